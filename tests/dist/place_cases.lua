-- The cases of tests/dist/place.lua: { name, shapes of the inputs, f(inputs, ids) -> outputs, ids = whether it takes the ids }.
local dt = require "dtrain"

local M = { list = {} }

-- 6 samples of 6 ids below 12
do
  local rows = {}
  for i = 0, 5 do
    rows[i + 1] = {}
    for j = 0, 5 do rows[i + 1][j + 1] = (i * 7 + j * 5 + i * j) % 12 end
  end
  M.ids = dt.tensor(rows, "i64")
end

local function case(name, shapes, f, o)
  o = o or {}
  o.name, o.shapes, o.f = name, shapes, f
  M.list[#M.list + 1] = o
end

-- elementwise, with broadcasting
case("gelu", { { 6, 12 } }, function(t) return dt.gelu(t[1]) end)
case("where", { { 6, 12 }, { 6, 12 } }, function(t) return dt.where(t[1]:gt(0), t[1], t[2] * 2) end)
case("add", { { 6, 12 }, { 6, 12 } }, function(t) return t[1] + t[2] end)
case("mul_row", { { 6, 6, 12 }, { 12 } }, function(t) return t[1] * t[2] end)
case("mul_column", { { 6, 12 }, { 6, 1 } }, function(t) return t[1] * t[2] end)
case("mul_outer", { { 6, 1 }, { 1, 12 } }, function(t) return t[1] * t[2] end)
case("mul_scalar", { { 6, 12 }, {} }, function(t) return t[1] * t[2] end)
case("chain", { { 6, 12 }, { 12 }, { 6, 1 } }, function(t) return dt.tanh(t[1] * t[2] + t[3]) * t[1] end)
case("cast", { { 6, 12 } }, function(t) return (t[1]:to "f64" * 2):to "f32" end)
-- reductions
for _, how in ipairs { "sum", "mean", "max", "min", "norm" } do
  for _, o in ipairs { { "all", {} }, { "rows", { 1 } }, { "first", { 0 } }, { "two", { 0, 2 } }, { "last", { 2 }, true } } do
    case(how .. "_" .. o[1], { { 6, 6, 12 } }, function(t) return t[1][how](t[1], { dims = o[2], keepdim = o[3] }) end)
  end
end
case("argmax", { { 6, 12 } }, function(t) return t[1]:argmax { dim = 1 } + 0 * t[1]:sum(1) end)
case("argmax_first", { { 6, 12 } }, function(t)
  return t[1]:argmax { dim = 0, keepdim = true } + 0 * t[1]:sum { dims = { 0 }, keepdim = true }
end)
case("variance", { { 6, 12 } }, function(t)
  local d = t[1] - t[1]:mean { dims = { 1 }, keepdim = true }
  return (d * d):mean { dims = { 1 } }
end)
case("softmax", { { 6, 6, 12 } }, function(t) return t[1]:softmax(-1) end)
case("softmax_middle", { { 6, 6, 12 } }, function(t) return t[1]:softmax(1) end)
case("log_softmax", { { 6, 6, 12 } }, function(t) return dt.log_softmax(t[1], { dim = 2 }) end)
case("cumsum", { { 6, 6, 12 } }, function(t) return dt.cumsum(t[1], { dim = 1 }) end)
-- products
case("matmul", { { 6, 12 }, { 12, 6 } }, function(t) return t[1]:matmul(t[2]) end)
case("matmul_ta", { { 12, 6 }, { 12, 18 } }, function(t) return dt.matmul(t[1], t[2], { ta = true }) end)
case("matmul_tb", { { 6, 12 }, { 18, 12 } }, function(t) return dt.matmul(t[1], t[2], { tb = true }) end)
case("matmul_tab", { { 12, 6 }, { 18, 12 } }, function(t) return dt.matmul(t[1], t[2], { ta = true, tb = true }) end)
case("matmul_batch", { { 6, 6, 12 }, { 6, 12, 6 } }, function(t) return t[1]:matmul(t[2]) end)
case("matmul_shared", { { 6, 6, 12 }, { 12, 6 } }, function(t) return t[1]:matmul(t[2]) end)
case("matmul_spread", { { 1, 6, 12 }, { 6, 12, 6 } }, function(t) return t[1]:matmul(t[2]) end)
case("linear", { { 6, 12 }, { 18, 12 } }, function(t) return dt.linear(t[1], t[2]) end)
case("linear_bias", { { 6, 6, 12 }, { 6, 12 }, { 6 } }, function(t) return dt.linear(t[1], t[2], t[3]) end)
case("mlp", { { 6, 12 }, { 18, 12 }, { 18 }, { 6, 18 }, { 6 } }, function(t)
  return dt.linear(dt.gelu(dt.linear(t[1], t[2], t[3])), t[4], t[5])
end, { few = true })
-- attention
local function heads(name, q, k, o)
  case(name, { q, k, k }, function(t) return dt.attention(t[1], t[2], t[3], o) end)
end
heads("attention", { 6, 6, 6, 4 }, { 6, 6, 6, 4 }, { causal = true })
heads("attention_bthd", { 6, 12, 6, 4 }, { 6, 12, 6, 4 }, { bthd = true })
heads("attention_grouped", { 6, 12, 6, 4 }, { 6, 6, 6, 4 }, { causal = true })
heads("attention_causal_short", { 6, 6, 6, 4 }, { 6, 6, 12, 4 }, { causal = true })
heads("attention_top_left", { 6, 6, 12, 4 }, { 6, 6, 6, 4 }, { causal = true, causal_align = "top_left" })
case("attention_lse", { { 6, 12, 6, 4 }, { 6, 12, 6, 4 }, { 6, 12, 6, 4 } }, function(t)
  return dt.attention(t[1], t[2], t[3], { causal = true, bthd = true, lse = true })
end, { few = true })
case("rotary", { { 6, 6, 12, 6 } }, function(t) return dt.rotary(t[1]) end)
case("rotary_bthd", { { 6, 12, 6, 6 } }, function(t) return dt.rotary(t[1], { bthd = true }) end)
case("qkv", { { 6, 6, 12 }, { 36, 12 } }, function(t)
  local y = dt.linear(t[1], t[2]):reshape { 6, 6, 3, 6, 2 }:permute { 2, 0, 3, 1, 4 }
  local function part(i) return y:slice { dim = 0, start = i, stop = i + 1 }:reshape { 6, 6, 6, 2 } end
  return dt.attention(part(0), part(1), part(2))
end)
case("qkv_split", { { 6, 6, 12 }, { 36, 12 }, { 36 } }, function(t)
  local q, k, v = dt.linear(t[1], t[2], t[3]):split({ 12, 12, 12 }, 2)
  local function part(x) return x:reshape { 6, 6, 6, 2 } end
  return dt.attention(part(q), part(k), part(v), { bthd = true })
end)
-- lookups
case("embedding", { { 12, 6 } }, function(t, ids) return dt.embedding(ids, t[1]) end, { ids = true })
case("gather", { { 6, 12 } }, function(t, ids) return dt.gather(t[1], ids, { dim = 1 }) end, { ids = true })
case("gather_along", { { 6, 12, 6 } }, function(t, ids)
  return dt.gather(t[1], dt.minimum(ids, 5):reshape { 6, 6, 1 }, { dim = 2 })
end, { ids = true })
case("one_hot", { { 6, 6, 12 } }, function(t, ids) return dt.one_hot(ids, { classes = 12 }):to "f32" * t[1] end, { ids = true })
case("topk_first", { { 6, 6, 12 } }, function(t) return (dt.topk(t[1], { k = 3 })) end)
case("topk", { { 6, 12 } }, function(t) return (dt.topk(t[1], { k = 6 })) end)
-- norms
case("layer_norm", { { 6, 6, 12 }, { 12 }, { 12 } }, function(t) return dt.layer_norm(t[1], t[2], t[3]) end)
case("layer_norm_two", { { 6, 6, 12 }, { 6, 12 }, { 6, 12 } }, function(t) return dt.layer_norm(t[1], t[2], t[3], { dims = 2 }) end)
case("layer_norm_plain", { { 6, 12 } }, function(t) return dt.layer_norm(t[1]) end)
case("rms_norm", { { 6, 6, 12 }, { 12 } }, function(t) return dt.rms_norm(t[1], t[2]) end)
local function batch_norm(name, training)
  case(name, { { 6, 12, 6, 6 }, { 12 }, { 12 }, { 12 } }, function(t)
    return (dt.batch_norm(t[1], t[2], t[3], dt.zeros { 12 }, dt.square(t[4]) + 1, { training = training }))
  end, { few = true })
end
batch_norm("batch_norm", true)
batch_norm("batch_norm_running", false)
-- images
case("conv2d", { { 6, 6, 6, 6 }, { 12, 6, 3, 3 }, { 12 } }, function(t) return dt.conv2d(t[1], t[2], t[3], { padding = 1 }) end)
case("conv2d_plain", { { 6, 6, 6, 6 }, { 12, 6, 3, 3 } }, function(t) return dt.conv2d(t[1], t[2], { stride = 2 }) end)
case("conv2d_groups", { { 6, 6, 6, 6 }, { 12, 1, 3, 3 } }, function(t) return dt.conv2d(t[1], t[2], { groups = 6 }) end)
case("conv2d_two_groups", { { 6, 12, 6, 6 }, { 12, 6, 3, 3 }, { 12 } },
  function(t) return dt.conv2d(t[1], t[2], t[3], { groups = 2 }) end)
case("max_pool2d", { { 6, 6, 6, 6 } }, function(t) return dt.max_pool2d(t[1], { kernel = 2 }) end)
case("avg_pool2d", { { 6, 6, 6, 6 } }, function(t) return dt.avg_pool2d(t[1], { kernel = 3, stride = 1, padding = 1 }) end)
-- random
case("dropout", { { 6, 6, 12 } }, function(t) return dt.dropout(t[1], 0.5) end, { out = { { 6, 6, 12 } } })
-- views and movement
case("reshape_join", { { 6, 6, 12 } }, function(t) return t[1]:reshape { 36, 12 } end)
case("reshape_cut", { { 6, 36 } }, function(t) return t[1]:reshape { 6, 6, 6 } end)
case("reshape_other", { { 6, 12 } }, function(t) return t[1]:reshape { 4, 18 } end)
case("reshape_one", { { 6, 1, 12 } }, function(t) return t[1]:reshape { 1, 6, 12 } end)
case("permute", { { 6, 12, 18 } }, function(t) return t[1]:permute { 2, 0, 1 } end)
case("slice", { { 6, 12 } }, function(t) return t[1]:slice { dim = 1, start = 1, stop = 8 } end)
case("slice_step", { { 6, 12 } }, function(t) return t[1]:slice { dim = 1, start = 0, stop = 12, step = 2 } end)
case("split", { { 6, 6, 12 } }, function(t) return t[1]:split({ 6, 6 }, 2) end)
case("split_uneven", { { 6, 6, 12 } }, function(t) return t[1]:split({ 4, 8 }, 2) end)
case("concat", { { 6, 12 }, { 6, 6 } }, function(t) return dt.concat({ t[1], t[2] }, 1) end)
case("concat_first", { { 6, 12 }, { 12, 12 } }, function(t) return dt.concat({ t[1], t[2] }, 0) end)
case("pad", { { 6, 12 } }, function(t) return dt.pad(t[1], { before = { 0, 1 }, after = { 0, 2 } }) end)
case("broadcast_to", { { 6, 1 } }, function(t) return t[1]:broadcast_to { 6, 6, 12 } end)
case("broadcast_first", { { 6, 12 } }, function(t) return t[1]:broadcast_to { 6, 6, 12 } end)
case("stack", { { 6, 12 }, { 6, 12 } }, function(t) return dt.stack({ t[1], t[2] }, 0) end)
case("clone", { { 6, 12 } }, function(t) return t[1]:permute { 1, 0 }:copy() end)
case("flatten_heads", { { 6, 6, 6, 2 } }, function(t) return t[1]:permute { 0, 2, 1, 3 }:reshape { 6, 6, 12 } end)
-- losses
local function loss(name, o)
  case(name, { { 6, 6, 12 } }, function(t, ids) return (dt.cross_entropy(t[1], ids, o)) end, { ids = true })
end
loss("cross_entropy", {})
loss("cross_entropy_ignore", { ignore_index = 5 })
loss("cross_entropy_smooth", { label_smoothing = 0.1 })
loss("cross_entropy_both", { ignore_index = 5, label_smoothing = 0.1 })
case("mse", { { 6, 12 }, { 6, 12 } }, function(t) return dt.nn.mse(t[1], t[2]) end)

-- ---- ways to lie ----
-- Four ranks are two axes of two: "S(0)/S(1)" is a place on both.
local function choices(shape, parts)
  local one, out = { "R" }, {}
  local ranks = parts == 4 and 2 or parts
  for d, n in ipairs(shape) do if n % ranks == 0 then one[#one + 1] = ("S(%d)"):format(d - 1) end end
  if parts ~= 4 then return one end
  for _, a in ipairs(one) do
    for _, b in ipairs(one) do
      local d = a == b and a:match "%d"
      if not d or shape[d + 1] % parts == 0 then out[#out + 1] = a == "R" and b == "R" and "R" or a .. "/" .. b end
    end
  end
  return out
end

--- { cut = "S(0)" } for a way, with a second axis { cut =, other = } for a way of two.
function M.place(way)
  local a, b = way:match "^(.*)/(.*)$"
  return { cut = a or way, other = b }
end

--- Every combination, as placements of the inputs (and the ids last), and once more as placements of parameters. `few`: with
--- at most one input divided.
function M.ways(c, parts)
  local list, out = {}, {}
  for i, shape in ipairs(c.shapes) do list[i] = choices(shape, parts) end
  if c.ids then list[#list + 1] = choices(M.ids:shape(), parts) end
  local function choose(i, way, cuts)
    if i > #list then
      if cuts == 0 then return end
      for _, params in ipairs { false, true } do
        local copy = table.move(way, 1, #list, 1, {})
        copy.params = params
        if not (params and c.ids) or copy[#list] == "R" then out[#out + 1] = copy end
      end
      return
    end
    for _, v in ipairs(list[i]) do
      way[i] = v
      local n = cuts + (v ~= "R" and 1 or 0)
      if not (c.few and n > 1) then choose(i + 1, way, n) end
    end
  end
  choose(1, {}, 0)
  return out
end

function M.title(c, how)
  return (("%s;%s%s"):format(c.name, how.params and "parameters " or "", table.concat(how, ",")):gsub("/", "|"))
end

return M
