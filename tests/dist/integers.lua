-- Integer arithmetic against Lua's own: every operation of the table that takes i64, on concrete tensors and traced, around 2^53 and
-- 2^62; and random chains, which fuse, in each integer dtype. Run by numbers_spec.lua with each instruction set and with two ranks.
local core = require "dtrain.core"
local dt = require "dtrain"

local big, huge = 1 << 53, 1 << 62
local X = { big - 1, big, big + 1, -big - 1, -big, -big + 1, huge - 1, huge + 1, -huge - 1, math.maxinteger, math.mininteger,
  0, 1, -1, 7 }
local Y = { 3, big + 1, big, big, -big - 1, -3, huge, huge + 1, -huge, 1, 1, -1, 62, 3, -2 }
local n = #X
local x, y = dt.tensor(X, "i64"), dt.tensor(Y, "i64")
local b = big + 1

local function each(f, ...)
  local out, lists = {}, { ... }
  for i = 1, n do
    local at = {}
    for k, list in ipairs(lists) do at[k] = list[i] end
    out[i] = f(table.unpack(at))
  end
  return out
end
local function sorted()
  local out = table.move(X, 1, n, 1, {})
  table.sort(out, function(p, q) return p > q end)
  return out
end
local function power(a, k)
  if k < 0 then return a == 1 and 1 or a == -1 and (k % 2 == 0 and 1 or -1) or 0 end
  local out = 1
  for _ = 1, k < 64 and k or 0 do out = out * a end
  return out
end
local total = 0
for _, v in ipairs(X) do total = total + v end
local running, sum = {}, 0
for i, v in ipairs(X) do
  sum = sum + v
  running[i] = sum
end
local small = dt.tensor({ 0, 3, 63, 2, 5, 1, 2, 0, 1, 2, 3, 4, 5, -1, -2 }, "i64")
local at = dt.tensor({ 14, 0, 3 }, "i64")

-- By operation: a call on tensors x and y, and what Lua says.
local known = {
  add = { function(p, q) return p + q end, each(function(v, w) return v + w end, X, Y) },
  sub = { function(p, q) return p - q end, each(function(v, w) return v - w end, X, Y) },
  mul = { function(p, q) return p * q end, each(function(v, w) return v * w end, X, Y) },
  pow = { function(p) return p ^ small end, each(power, X, small:totable()) },
  neg = { function(p) return -p end, each(function(v) return -v end, X) },
  abs = { function(p) return p:abs() end, each(function(v) return v < 0 and -v or v end, X) },
  sign = { function(p) return p:sign() end, each(function(v) return v > 0 and 1 or v < 0 and -1 or 0 end, X) },
  floor = { function(p) return p:floor() end, X },
  square = { function(p) return p:square() end, each(function(v) return v * v end, X) },
  relu = { function(p) return p:relu() end, each(function(v) return math.max(v, 0) end, X) },
  minimum = { function(p, q) return p:minimum(q) end, each(math.min, X, Y) },
  maximum = { function(p, q) return p:maximum(q) end, each(math.max, X, Y) },
  eq = { function(p) return p:eq(b) end, each(function(v) return v == b end, X) },
  ne = { function(p, q) return p:ne(q) end, each(function(v, w) return v ~= w end, X, Y) },
  lt = { function(p) return p:lt(b) end, each(function(v) return v < b end, X) },
  le = { function(p, q) return p:le(q) end, each(function(v, w) return v <= w end, X, Y) },
  gt = { function(p, q) return p:gt(q) end, each(function(v, w) return v > w end, X, Y) },
  ge = { function(p) return p:ge(b) end, each(function(v) return v >= b end, X) },
  where = { function(p, q) return dt.where(p:lt(q), p, b) end, each(function(v, w) return v < w and v or b end, X, Y) },
  clamp = { function(p) return p:clamp(-big + 1, b) end, each(function(v) return math.max(-big + 1, math.min(v, b)) end, X) },
  isfinite = { function(p) return p:isfinite() end, each(function() return true end, X) },
  cast = { function(p) return p:to "i32" end, each(function(v) return string.unpack("<i4", string.pack("<i8", v)) end, X) },
  relu_bwd = { function(p, q) return core.op("relu_bwd", p, q) end, each(function(v, w) return w <= 0 and 0 or v end, X, Y) },
  clamp_bwd = { function(p, q) return core.op("clamp_bwd", p, q, { min = b, max = huge }) end,
    each(function(v, w) return w >= b and w <= huge and v or 0 end, X, Y) },
  sum = { function(p) return p:sum() end, total },
  max = { function(p) return p:max() end, math.maxinteger },
  min = { function(p) return p:min() end, math.mininteger },
  argmax = { function(p) return p:argmax() end, 9 },
  cumsum = { function(p) return p:cumsum(0) end, running },
  topk = { function(p) return (p:topk(n)) end, sorted() },
  copy = { function(p) return p:copy() end, X },
  concat = { function(p, q) return dt.concat({ p, q }, 0):slice { dim = 0, start = 0, stop = n } end, X },
  pad = { function(p) return p:slice(0, 0, 1):pad { before = { 1 }, after = { 0 }, value = -b } end, { -b, X[1] } },
  gather = { function(p) return p:gather(at, 0) end, { X[15], X[1], X[4] } },
  scatter_add = { function(p) return core.op("scatter_add", (p * 0):slice(0, 0, 2), p:slice(0, 6, 8), { dim = 0, shape = { 2 } }) end,
    { X[7] + X[8], 0 } },
  one_hot = { function(p) return (p * 0 + 1):slice(0, 0, 1):one_hot { classes = 3 } end, { { 0, 1, 0 } } },
  reshape = { function(p) return p:reshape { 3, 5 }:reshape { n } end, X },
  permute = { function(p) return p:permute { 0 } end, X },
  slice = { function(p) return p:slice(0, 1, 3) end, { X[2], X[3] } },
  broadcast_to = { function(p) return p:slice(0, 2, 3):broadcast_to { 2, 1 } end, { { X[3] }, { X[3] } } },
  split = { function(p) return (p:split { dim = 0, sizes = { 3, n - 3 } }) end, { X[1], X[2], X[3] } },
  stop_gradient = { function(p) return p:stop_gradient() end, X },
}
local function traced(call, inputs)
  local g, symbols = core.graph { plain_grad = true }, {}
  for k, t in ipairs(inputs) do symbols[k] = g:input("x" .. k, t:dtype(), t:shape()) end
  g:output(call(table.unpack(symbols)), "out")
  local exec = core.exec(g:compile { precision = "f32" }, { alone = true })
  exec:ready()
  return exec:call(0, inputs)[1]
end

local function same(a, c)
  if type(a) ~= "table" then return a == c and math.type(a) == math.type(c) end
  for i = 1, math.max(#a, #c) do
    if not same(a[i], c[i]) then return false end
  end
  return true
end
local function show(v)
  if type(v) ~= "table" then return tostring(v) end
  local out = {}
  for i, w in ipairs(v) do out[i] = show(w) end
  return "{" .. table.concat(out, ", ") .. "}"
end
local function values(t) return t:dim() == 0 and t:item() or t:totable() end

local names = core.ops()
for _, name in ipairs { "relu_bwd", "clamp_bwd" } do names[#names + 1] = name end
local tested = 0
for _, name in ipairs(names) do
  local case = known[name]
  if case then
    tested = tested + 1
    for how, got in pairs { concrete = case[1](x, y), traced = traced(case[1], { x, y }) } do
      local have = values(got)
      if not same(have, case[2]) then error(("%s, %s: %s, Lua says %s"):format(name, how, show(have), show(case[2]))) end
    end
  else -- refused, or a float
    for inputs = 1, 3 do
      local ok, out = pcall(core.op, name, table.unpack({ x, y, y }, 1, inputs))
      assert(not ok or not out:dtype():find "^[iu]", name .. " of integers has no value in this test")
    end
  end
end
assert(tested > 40)

-- Chains: the same random program by Lua, value by value, wrapped to the dtype after each operation.
local wrap = {
  i64 = function(v) return v end,
  i32 = function(v) return (string.unpack("<i4", string.pack("<i8", v))) end,
  u8 = function(v) return v & 255 end,
}
local key = 0
local function draw(k)
  key = key + 1
  return dt.randint(0, k, { 1 }, key):item()
end
local makes = {
  function(p, q) return p + q end, function(p, q) return p - q end, function(p, q) return p * q end,
  function(p) return -p end, function(p) return p end,
}
local function chain(dtype)
  local count, w = 3, wrap[dtype]
  local program = {}
  for i = 1, 12 do program[i] = { draw(9), 1 + draw(count), 1 + draw(count) } count = count + 1 end
  local function tensors(p, q, r)
    local list = { p, q, r }
    for _, s in ipairs(program) do
      local a, c = list[s[2]], list[s[3]]
      local v
      if s[1] <= 3 then v = makes[s[1] + 1](a, c)
      elseif s[1] == 4 then v = a:minimum(c)
      elseif s[1] == 5 then v = a:maximum(c)
      elseif s[1] == 6 then v = dt.where(a:lt(c), a, c + 1)
      elseif s[1] == 7 then v = a:square() - c
      else v = dt.where(a:eq(c), a * 3, c) end
      list[#list + 1] = v
    end
    return list[#list]
  end
  local function numbers(p, q, r)
    local list = { p, q, r }
    for _, s in ipairs(program) do
      local a, c = list[s[2]], list[s[3]]
      local v
      if s[1] <= 3 then v = makes[s[1] + 1](a, c)
      elseif s[1] == 4 then v = math.min(a, c)
      elseif s[1] == 5 then v = math.max(a, c)
      elseif s[1] == 6 then v = a < c and a or w(c + 1)
      elseif s[1] == 7 then v = w(a * a) - c
      else v = a == c and a * 3 or c end
      list[#list + 1] = w(v)
    end
    return list[#list]
  end
  local lists, inputs = {}, {}
  for k = 1, 3 do
    lists[k] = {}
    for i = 1, n do lists[k][i] = w(k == 1 and X[i] or k == 2 and Y[i] or X[n + 1 - i] * 3) end
    inputs[k] = dt.tensor(lists[k], dtype)
  end
  local got = traced(tensors, inputs)
  local want = each(numbers, table.unpack(lists))
  assert(got:dtype() == dtype)
  assert(same(got:totable(), want), dtype .. ": " .. show(got:totable()) .. ", Lua says " .. show(want))
  assert(same(tensors(table.unpack(inputs)):totable(), want), dtype)
end
for _, dtype in ipairs { "i64", "i32", "u8" } do
  for _ = 1, 12 do chain(dtype) end
end

local ranks = dt.size()
assert(dt.all_reduce(x, "sum"):totable()[3] == ranks * X[3] and dt.all_reduce(x, "max"):totable()[1] == X[1])
print "exact"
