-- Values and gradients at the ends of the number line (0, -0, infinities, NaN, denormals, the largest, ties, constant rows) against
-- PyTorch's, for every operation that tests/data/extremes.json knows. Where the file also gives what f64 arithmetic gives, either
-- will do.
-- The last test asks that no elementwise operation and no reduction of the op table is left out.
local core = require "dtrain.core"
local dt = require "dtrain"
local file = core.json "tests/data/extremes.json"

local special = { inf = math.huge, ["-inf"] = -math.huge, nan = 0 / 0 }
local function number(v) return type(v) == "string" and special[v] or v * 1.0 end
local function numbers(list)
  local out = {}
  for i, v in ipairs(type(list) == "table" and list or { list }) do out[i] = number(v) end
  return out
end

local function infinite(v) return v == math.huge or v == -math.huge end
local function any(list, f)
  for _, v in ipairs(list) do if f(v) then return true end end
  return false
end
local function ties(list)
  local seen = {}
  return any(list, function(v)
    local again = seen[v] or v ~= v
    if v == v then seen[v] = true end
    return again
  end)
end
local function beyond(v) return infinite(v) or math.abs(v) > 3e38 end -- differences of such numbers overflow
local function zero(_, have, want) return have == 0 and want == 0 end

-- Where the result is another than PyTorch's, and why: by operation and "value" or "gradient", a function of (the inputs, what came
-- out, what PyTorch gives) that is true for the places meant.
local differs = {
  -- a limit that exists: PyTorch has NaN
  ["gelu_tanh gradient"] = function(x) return infinite(x[1]) end,
  -- a bound belongs to the range: its gradient passes
  ["clamp gradient"] = function(_, have, want) return have == 1 and want == 0 end,
  -- C's pow; PyTorch takes a square root where the exponent is the number 0.5
  ["pow exponent=0.5 value"] = function(x) return x[1] == 0 or x[1] == -math.huge end,
  ["pow exponent=0.5 gradient"] = function(x) return x[1] == 0 or x[1] == -math.huge end,
  -- signs of zeros that no formula decides
  ["gelu value"] = zero, ["elu value"] = zero, ["max value"] = zero, ["topk value"] = zero, ["min value"] = zero,
  -- softmax of the row, which PyTorch takes from a rounded result
  ["logsumexp gradient"] = function(x, have) return math.abs(x[1]) > 1e7 and 1 / have - 1 / have % 1 < 5.1 end,
  -- an infinity makes the mean infinite, and all differences from it NaN or infinite
  ["layer_norm value"] = function(x) return any(x, beyond) end,
  ["var gradient"] = function(x) return any(x, beyond) end,
  ["var0 gradient"] = function(x) return any(x, beyond) end,
  ["std gradient"] = function(x) return any(x, beyond) end,
  -- the sum is an f64
  ["sum_squares value"] = function(_, have, want) return have > 3.5e38 and want == math.huge end,
  -- the first of equals is chosen; PyTorch chooses some
  ["topk gradient"] = ties,
  -- the norm is rounded to a denormal before it divides
  ["norm gradient"] = function(x, have) return x[1] == x[2] and x[1] > 0 and x[1] < 1e-44 and math.abs(have - 0.447) < 0.1 end,
}

-- Equal but for rounding: NaN with NaN, infinity with the same one, zeros with their sign where `signs`.
local function close(have, want, rtol, signs, around)
  if have ~= have or want ~= want then return have ~= have and want ~= want end
  if have == want then return not signs or want ~= 0 or 1 / have == 1 / want end
  if have - have ~= 0 or want - want ~= 0 then return false end
  if math.abs(have - want) <= (around or 0) then return true end
  return math.abs(have - want) <= rtol * math.abs(want) + 5.7e-45 -- four units of the denormals
end

-- around: absolute error allowed. inputs(i): what element i was made from.
local function compare(op, what, have, want, f64, inputs, bad, around)
  assert(#have == #want, op)
  for i = 1, #want do
    local h, w, x = have[i], want[i], inputs(i)
    local other, signs, known = f64 and f64[tostring(i - 1)], what == "value", differs[op .. " " .. what]
    local ok = close(h, w, 2e-6, signs, around) or (other ~= nil and close(h, number(other), 2e-6, signs, around))
    if not ok and not (known and known(x, h, w)) then
      bad[#bad + 1] = ("%s of {%s}: %.9g, PyTorch %.9g%s"):format(what, table.concat(x, ", "), h, w, other and (", f64 "
        .. "%s"):format(other) or "")
    end
  end
end

local function flat(t) return t:to("f64"):reshape({ -1 }):totable() end

local unary = setmetatable({
  clamp = function(x, a) return dt.clamp(x, a) end,
  cast = function(x, a) return x:to(a.dtype):to "f32" end,
  pow = function(x, a) return dt.pow(x, a.exponent) end,
}, { __index = function(_, name) return rawget(dt, name) and function(x) return dt[name](x) end end })

local weight, bias = { 1.0, 0.5, -2.0, 1.0, 3.0 }, { 0.0, 1.0, -1.0, 0.5, 2.0 }
local function row(w, n) return dt.tensor(w, "f32"):reshape { n or 5 } end
local rows = {
  sum = function(x) return x:sum() end, mean = function(x) return x:mean() end,
  max = function(x) return x:max() end, min = function(x) return x:min() end,
  norm = function(x) return x:norm() end,
  sum_squares = function(x) return dt.sum_squares(x) end,
  argmax = function(x) return x:argmax() end,
  logsumexp = function(x) return dt.logsumexp(x, -1) end,
  var = function(x) return dt.var(x) end,
  var0 = function(x) return dt.var(x, nil, { correction = 0 }) end,
  std = function(x) return dt.std(x) end,
  softmax = function(x) return dt.softmax(x, -1) end,
  log_softmax = function(x) return dt.log_softmax(x, -1) end,
  cumsum = function(x) return dt.cumsum(x, 0) end,
  topk = function(x) return dt.topk(x, 2) end,
  layer_norm = function(x) return dt.layer_norm(x, row(weight), row(bias), { eps = 1e-5 }) end,
  rms_norm = function(x) return dt.rms_norm(x, row(weight), { eps = 1e-6 }) end,
  cross_entropy = function(x) return (dt.cross_entropy(x:reshape { 1, 5 }, dt.tensor({ 1 }, "i64"))) end,
  nll_of_target_0 = function(x) return (dt.cross_entropy(x:reshape { 1, 5 }, dt.tensor({ 0 }, "i64"))) end,
}

local function report(name, bad)
  if #bad == 0 then return end
  for i = 13, #bad do bad[i] = nil end
  error(name .. ":\n  " .. table.concat(bad, "\n  "), 0)
end

-- Gradients of sum(f(x...) * gout) by each of the list `learn`.
local function gradients(f, inputs, gout)
  local _, grads = dt.value_and_grad(function(m)
    local y = f(m.a, m.b)
    if gout then y = y * gout end
    return y:to("f32"):sum()
  end, { a = inputs[1], b = inputs[2] })
  return { grads.a, grads.b }
end
-- Operations without a gradient rule: the gradient is zero, and asking for it alone is an error.
local flat_ops = { sign = true, floor = true, sum_squares = true }

describe("extreme values, elementwise", function()
  local x = numbers(file.unary.x)
  for _, case in ipairs(file.unary.ops) do
    local f = unary[case.op]
    if f then
      local label = case.op
      for k, v in dt.sorted(case.attrs or {}) do if k ~= "note" then label = label .. (" %s=%s"):format(k, v) end end
      local known = case.op == "pow" and label or case.op
      it(label, function()
        local bad = {}
        local function at(i) return { x[i] } end
        local t = dt.tensor(x, "f32")
        local attrs = {}
        for k, v in pairs(case.attrs or {}) do if k ~= "note" then attrs[k] = v end end
        compare(known, "value", flat(f(t, attrs)), numbers(case.value), case.f64 and case.f64.value, at, bad)
        if case.grad and not flat_ops[case.op] then
          local g = gradients(function(y) return f(y, attrs) end, { t })
          compare(known, "gradient", flat(g[1]), numbers(case.grad), case.f64 and case.f64.grad, at, bad)
        end
        report(label, bad)
      end)
    end
  end

  local a, b = numbers(file.binary.a), numbers(file.binary.b)
  for _, case in ipairs(file.binary.ops) do
    local f = rawget(dt, case.op)
    if case.op == "where" then f = function(p, q) return dt.where(dt.ne(p, 0), p, q) end end
    if f then
      it(case.op .. " of two", function()
        local bad = {}
        local function at(i) return { a[i], b[i] } end
        local p, q = dt.tensor(a, "f32"), dt.tensor(b, "f32")
        compare(case.op, "value", flat(f(p, q)), numbers(case.value), case.f64 and case.f64.value, at, bad)
        if case.grad_a then
          local g = gradients(f, { p, q })
          compare(case.op, "gradient by a", flat(g[1]), numbers(case.grad_a), case.f64 and case.f64.grad_a, at, bad)
          compare(case.op, "gradient by b", flat(g[2]), numbers(case.grad_b), case.f64 and case.f64.grad_b, at, bad)
        end
        report(case.op, bad)
      end)
    end
  end
end)

-- Rounding of the largest result of a row is no error of the others.
local function around(want)
  local most = 0
  for _, v in ipairs(numbers(want)) do
    if v - v == 0 then most = math.max(most, math.abs(v)) end
  end
  return 1e-6 * most
end

describe("extreme values, rows", function()
  local gout = numbers(file.reduction.gout)
  for _, case in ipairs(file.reduction.ops) do
    local f = rows[case.op]
    if f then
      it(case.op, function()
        local bad = {}
        for k, r in ipairs(case.rows) do
          local x = numbers(file.reduction.rows[k])
          local function at() return x end
          local t = dt.tensor(x, "f32")
          local y = f(t)
          local f64 = r.f64 or {}
          compare(case.op, "value", flat(y), numbers(r.value), f64.value, at, bad, around(r.value))
          if r.grad and not flat_ops[case.op] then
            local n = y:numel()
            local g = gradients(f, { t }, n > 1 and dt.tensor({ table.unpack(gout, 1, n) }, "f32") or nil)
            compare(case.op, "gradient", flat(g[1]), numbers(r.grad), f64.grad, at, bad, around(r.grad))
          end
        end
        report(case.op, bad)
      end)
    end
  end
end)

it("no operation of a number is left out", function()
  local known = {}
  for _, case in ipairs(file.unary.ops) do known[case.op] = true end
  for _, case in ipairs(file.binary.ops) do known[case.op] = true end
  for _, case in ipairs(file.reduction.ops) do known[case.op] = true end
  local count, rest = 0, {}
  for line in io.lines "kernels/elementwise.def" do
    local name = line:match "^EW%(([%w_]+),"
    if name then count = count + 1 end
    if name and not known[name] and not name:find "_bwd$" then rest[#rest + 1] = name end
  end
  assert.is_true(count > 40)
  assert.are.same({ "full" }, rest)
end)
