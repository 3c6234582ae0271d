-- The tensor operations: every row of the op table as a function, and the ones that are compositions of rows. All
-- work on symbolic tensors (traced) and concrete ones (run at once). Names, defaults and broadcasting as in PyTorch;
-- dims count from 0 and may be negative.
local core = require "dtrain.core"
local scope = require "dtrain.nn.scope"
local util = require "dtrain.util"

local ops = {}

-- The table of methods that concrete and symbolic tensors share: its entries are the op table's closures, and the
-- compositions below join them.
local methods = core.methods()
for _, name in ipairs(core.ops()) do ops[name] = methods[name] end

local op = core.op

--- Whether x is a tensor, concrete or symbolic.
ops.is_tensor = core.is_tensor
--- Whether x is a concrete tensor.
function ops.is_concrete(x) return core.is_tensor(x) and not core.is_symbolic(x) end

local function tensor(what, x)
  if not ops.is_tensor(x) then util.fail("%s wants a tensor, got %s (%s)", what, util.show(x), util.kind(x)) end
  return x
end

local function dim_of(what, x, dim, extra)
  local n = x:dim() + (extra or 0)
  util.check(what .. ": dim", dim, "integer")
  if dim < -n or dim >= n then
    util.fail("%s: dim %d is outside a tensor of %d dims; %d to %d would do", what, dim, n, -n, n - 1)
  end
  return dim < 0 and dim + n or dim
end

local function list_of_tensors(what, list)
  if type(list) ~= "table" or #list == 0 then util.fail("%s wants a list of tensors, got %s", what, util.show(list)) end
  for _, x in ipairs(list) do tensor(what, x) end
  return list
end

-- ---- results of which only the first is meant ----

--- Softmax attention: q[B,H,T,D], k and v [B,Hk,S,D] with Hk dividing H (bthd = true: [B,T,H,D]) -> as q.
--- attrs: causal, causal_align, scale (0 = 1/sqrt(D)), bthd. No T x S matrix is held (Dao 2023). causal with T queries and S
--- keys: causal_align = "bottom_right" (the default): query i sees keys up to i + S - T, as when a cache holds earlier
--- keys; "top_left": up to i, as PyTorch's is_causal. With S = T they are one. offset = n: query i sees n keys more.
--- lse = true: a second result f32[B,H,T], the log of the sum of exp of each query's scaled scores, with which results over
--- parts of the keys are put together; it has a gradient.
function ops.attention(q, k, v, attrs)
  local lse = false
  if type(attrs) == "table" and (attrs.causal_align ~= nil or attrs.lse ~= nil) then
    local align = attrs.causal_align
    lse = util.check("attention: lse", attrs.lse or false, "boolean")
    attrs = util.copy(attrs)
    attrs.causal_align, attrs.lse = nil, nil
    if align ~= nil and align ~= "top_left" and align ~= "bottom_right" then
      util.fail('attention: causal_align is "bottom_right" or "top_left", got %s', util.show(align))
    end
    if align then attrs.top_left = align == "top_left" end
  end
  local o, l = op("attention", q, k, v, attrs)
  if lse then return o, l end
  return o
end

--- Layer norm over the last attrs.dims dims (1), with weight and bias when given.
function ops.layer_norm(...) return (op("layer_norm", ...)) end

--- x / sqrt(mean(x^2) + eps) * w over the last attrs.dims dims (Zhang and Sennrich 2019).
function ops.rms_norm(...) return (op("rms_norm", ...)) end

--- Max pooling of [N,C,H,W]; attrs: kernel, stride (kernel), padding, dilation; a number or a pair {h, w} each.
function ops.max_pool2d(x, attrs) return (op("max_pool2d", x, attrs)) end

--- Mean cross entropy of logits[...,C] and labels[...] over the labels that are not ignore_index, and their count
--- (0-dim). attrs: ignore_index (-100), label_smoothing (0).
function ops.cross_entropy(logits, labels, attrs)
  scope.ignore(type(attrs) == "table" and attrs.ignore_index or -100)
  local loss, count = op("cross_entropy", logits, labels, attrs)
  return loss, count
end

--- x:place{ tensor = "S(1)" }: where a traced value lies on the mesh: "R" (whole on every rank) or "S(dim)" (divided by
--- that dim). What the script does not say is derived.
function ops.place(x, where)
  if not core.is_symbolic(tensor("place", x)) then return x end
  return scope.current.graph:placed(x, where)
end

-- ---- names and forms of PyTorch ----

--- dt.gelu(x [, "tanh" | { approximate = "tanh" }])
function ops.gelu(x, form)
  if type(form) == "table" then form = form.approximate end
  if form == "tanh" then return op("gelu_tanh", x) end
  if form ~= nil and form ~= "none" then util.fail("gelu: approximate is 'none' or 'tanh', got %s", util.show(form)) end
  return op("gelu", x)
end

--- Zeroes elements with probability p and divides the rest by 1 - p, while training only.
function ops.dropout(x, p, training)
  p = util.check("dropout: p", p == nil and 0.5 or p, "fraction")
  if training == nil then training = scope.is_training() end
  if not training or p == 0 then return x end
  return op("dropout", x, { p = p, key = scope.next_dropout() })
end

--- Joins tensors along a dim: dt.cat({ a, b }, 0).
function ops.concat(list, dim, ...)
  if ops.is_tensor(list) then return op("concat", list, dim, ...) end
  list_of_tensors("concat", list)
  local args = { table.unpack(list) }
  args[#args + 1] = { dim = dim or 0 }
  return op("concat", table.unpack(args))
end
ops.cat = ops.concat

--- A dim of size 1 put in at `dim`.
function ops.unsqueeze(x, dim)
  local shape = tensor("unsqueeze", x):shape()
  table.insert(shape, dim_of("unsqueeze", x, dim, 1) + 1, 1)
  return op("reshape", x, { shape = shape })
end

--- The dim `dim` of size 1 taken out; without dim all of them.
function ops.squeeze(x, dim)
  local shape, out = tensor("squeeze", x):shape(), {}
  local only = dim and dim_of("squeeze", x, dim) + 1
  for i, d in ipairs(shape) do
    if d ~= 1 or (only and i ~= only) then out[#out + 1] = d end
  end
  return op("reshape", x, { shape = out })
end

--- Dims start..stop (both inside, default all) made one.
function ops.flatten(x, start, stop)
  local shape, out = tensor("flatten", x):shape(), {}
  if #shape == 0 then return op("reshape", x, { shape = { 1 } }) end
  local a, b = dim_of("flatten", x, start or 0), dim_of("flatten", x, stop or -1)
  local n = 1
  for i, d in ipairs(shape) do
    if i - 1 < a or i - 1 > b then
      out[#out + 1] = d
    else
      n = n * d
      if i - 1 == b then out[#out + 1] = n end
    end
  end
  return op("reshape", x, { shape = out })
end

--- Tensors of one shape side by side along a new dim.
function ops.stack(list, dim)
  list_of_tensors("stack", list)
  return ops.concat(util.map(list, function(x) return ops.unsqueeze(x, dim or 0) end), dim or 0)
end

local SPLIT = core.limits.results -- of one split

-- Appends x cut along dim into pieces to out: more than one split can make are cut from the pieces of a first one.
local function cut(x, sizes, dim, out)
  if #sizes <= SPLIT then return table.move({ op("split", x, { dim = dim, sizes = sizes }) }, 1, #sizes, #out + 1, out) end
  local each, sums = 1, {}
  while each * SPLIT < #sizes do each = each * SPLIT end
  for i, n in ipairs(sizes) do
    local k = (i - 1) // each + 1
    sums[k] = (sums[k] or 0) + util.check("split: sizes", n, "integer")
  end
  for k, part in ipairs { op("split", x, { dim = dim, sizes = sums }) } do
    cut(part, table.move(sizes, (k - 1) * each + 1, math.min(k * each, #sizes), 1, {}), dim, out)
  end
  return out
end

--- x cut along dim into pieces: sizes a list, or one size for all (the last may be smaller).
function ops.split(x, sizes, dim)
  if type(sizes) == "table" and sizes.sizes then sizes, dim = sizes.sizes, sizes.dim end
  dim = dim_of("split", tensor("split", x), dim or 0)
  if type(sizes) == "number" then
    local left, size = x:size(dim), util.check("split: size", sizes, "count")
    sizes = {}
    while left > 0 do
      sizes[#sizes + 1] = math.min(size, left)
      left = left - size
    end
  end
  if type(sizes) ~= "table" or #sizes <= SPLIT then return op("split", x, { dim = dim, sizes = sizes }) end
  return table.unpack(cut(x, sizes, dim, {}))
end

--- x cut along dim into n pieces, the last maybe smaller.
function ops.chunk(x, n, dim)
  dim = dim_of("chunk", tensor("chunk", x), dim or 0)
  return ops.split(x, (x:size(dim) + n - 1) // n, dim)
end

ops.expand = ops.broadcast_to
ops.detach = ops.stop_gradient

-- ---- compositions ----

--- x where positive, else slope * x (0.01).
function ops.leaky_relu(x, slope)
  if type(slope) == "table" then slope = slope.negative_slope end
  return op("where", op("gt", x, 0), x, x * (slope or 0.01))
end

--- x where positive, else alpha (e^x - 1) (Clevert et al. 2016).
function ops.elu(x, alpha)
  if type(alpha) == "table" then alpha = alpha.alpha end
  local above = op("gt", x, 0)
  return op("where", above, x, (op("exp", op("where", above, 0, x)) - 1) * (alpha or 1))
end

--- x clamp(x + 3, 0, 6) / 6 (Howard et al. 2019).
function ops.hardswish(x) return x * op("clamp", x + 3, { min = 0, max = 6 }) / 6 end

--- x tanh(softplus(x)) (Misra 2019).
function ops.mish(x) return x * op("tanh", op("softplus", x)) end

-- dims as a list; nil = all
local function dims_of(what, x, dims)
  if dims == nil then
    local all = {}
    for i = 1, x:dim() do all[i] = i - 1 end
    return all
  end
  if type(dims) == "number" then dims = { dims } end
  return util.map(dims, function(d) return dim_of(what, x, d) end)
end

--- log(sum(exp(x))) over dims, without overflow.
function ops.logsumexp(x, dims, keepdim)
  if type(dims) == "table" and not dims[1] then dims, keepdim = dims.dims or dims.dim, dims.keepdim end
  dims = dims_of("logsumexp", tensor("logsumexp", x), dims)
  local top = op("stop_gradient", op("max", x, { dims = dims, keepdim = true }))
  top = op("where", op("isfinite", top), top, 0) -- infinities come out of exp and log by themselves
  local total = op("log", op("sum", op("exp", x - top), { dims = dims, keepdim = true })) + top
  if keepdim then return total end
  local shape, drop, out = total:shape(), {}, {}
  for _, d in ipairs(dims) do drop[d + 1] = true end
  for i, d in ipairs(shape) do if not drop[i] then out[#out + 1] = d end end
  return op("reshape", total, { shape = out })
end

-- What var and std sum: the distances from the mean over dims, how to reduce them, and the number that divides.
local function spread(what, x, dims, attrs)
  if type(dims) == "table" and not dims[1] then dims, attrs = dims.dims or dims.dim, dims end
  attrs = attrs or {}
  dims = dims_of(what, tensor(what, x), dims)
  local n = 1
  for _, d in ipairs(dims) do n = n * x:size(d) end
  local away = x - op("mean", x, { dims = dims, keepdim = true })
  return away, { dims = dims, keepdim = attrs.keepdim or false }, n - (attrs.correction or 1)
end

--- Variance over dims (all): sum((x - mean)^2) / (n - correction); attrs: correction (1), keepdim.
function ops.var(x, dims, attrs)
  local away, how, n = spread("var", x, dims, attrs)
  return op("sum", op("square", away), how) / n
end

--- Square root of dt.var; its gradient is 0 where all elements are equal.
function ops.std(x, dims, attrs)
  local away, how, n = spread("std", x, dims, attrs)
  return op("norm", away, how) / math.sqrt(math.max(n, 0))
end

--- Group norm of [N,C,...]: statistics over each of `groups` groups of channels (Wu and He 2018); weight and bias [C]
--- or nil.
function ops.group_norm(x, groups, weight, bias, eps)
  if type(groups) == "table" then groups, eps = groups.groups, groups.eps end
  local shape = tensor("group_norm", x):shape()
  if shape[2] % groups ~= 0 then
    util.fail("group_norm: %d channels do not divide by %d groups", shape[2], groups)
  end
  local y = op("reshape", x, { shape = { shape[1], groups, -1 } })
  y = op("reshape", ops.layer_norm(y, { dims = 1, eps = eps or 1e-5 }), { shape = shape })
  local one = util.map(shape, function(d, i) return i == 2 and d or 1 end)
  if weight then y = y * op("reshape", weight, { shape = one }) end
  if bias then y = y + op("reshape", bias, { shape = one }) end
  return y
end

--- Average pooling of [N,C,H,W] to an output of size n or {h, w}: window i covers floor(iH/h) .. ceil((i+1)H/h) - 1.
function ops.adaptive_avg_pool2d(x, output)
  if type(output) == "table" and output.output_size then output = output.output_size end
  local out = util.pair(util.check("adaptive_avg_pool2d: output", output, "pair"))
  local height, width = tensor("adaptive_avg_pool2d", x):size(2), x:size(3)
  if out[1] == 1 and out[2] == 1 then return op("mean", x, { dims = { 2, 3 }, keepdim = true }) end
  if height % out[1] == 0 and width % out[2] == 0 then
    local kernel = { height // out[1], width // out[2] }
    return op("avg_pool2d", x, { kernel = kernel, stride = kernel })
  end
  local function along(y, dim, size, n)
    local parts = {}
    for i = 0, n - 1 do
      local a, b = i * size // n, -(-(i + 1) * size // n)
      parts[#parts + 1] = op("mean", op("slice", y, { dim = dim, start = a, stop = b }),
        { dims = { dim }, keepdim = true })
    end
    return ops.concat(parts, dim)
  end
  return along(along(x, 2, height, out[1]), 3, width, out[2])
end

for _, name in ipairs { "attention", "layer_norm", "rms_norm", "max_pool2d", "cross_entropy", "gelu", "dropout",
  "unsqueeze",
  "squeeze", "flatten", "split", "chunk", "expand", "detach", "leaky_relu", "elu", "hardswish", "mish", "logsumexp",
    "var",
  "std", "group_norm", "adaptive_avg_pool2d", "place" } do
  methods[name] = ops[name]
end

return ops
