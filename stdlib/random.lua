-- dt.rand, randn, randint, randperm. Outside of a model they make concrete tensors. In a forward that is traced they become operations
-- that draw anew in each step, by the run's seed, the step and the sample, as dropout does: the same numbers for any number of ranks.
local core = require "dtrain.core"
local scope = require "dtrain.nn.scope"
local util = require "dtrain.util"

local random = {}

-- The trace in which numbers are drawn anew, or nil. dt.value_and_grad traces at each call, so constants are fresh there.
local function traced()
  local s = scope.current
  return s and not s.concrete and s or nil
end

-- A symbol of random numbers. The first dim counts samples where it is as large as the microbatch; options.samples says otherwise.
local function symbol(what, s, shape, dtype, normal, options)
  local o = util.options(what, options, { { "samples", "boolean" } })
  local samples = o.samples
  if samples == nil then samples = shape[1] == s.rows end
  return core.op("random", s.graph:full(shape, 0, dtype or "f32"), { normal = normal, key = scope.next_dropout(), samples = samples })
end

-- draw(shape [, seed [, dtype]]): seed may be a table of options.
local function floats(name, normal)
  return function(shape, seed, dtype)
    local s = traced()
    if not s or type(seed) == "number" then
      if type(seed) == "table" then seed = nil end
      return core[name](shape, seed, dtype)
    end
    return symbol("dt." .. name, s, shape, dtype, normal, seed)
  end
end

--- dt.rand(shape [, seed [, dtype = "f32"]]): evenly from [0, 1). In a forward without a seed: fresh numbers in each step; with one
--- a constant. Instead of the seed { samples = true or false } says whether the first dim counts samples (default: it does where it
--- is as large as the microbatch); where none does, all samples and ranks get the same numbers.
random.rand = floats("rand", false)
--- dt.randn(shape [, seed [, dtype = "f32"]]): of the normal distribution, mean 0 and variance 1; as dt.rand.
random.randn = floats("randn", true)

--- dt.rand_like(x), dt.randn_like(x): of x's shape and dtype.
function random.rand_like(x) return random.rand(x:shape(), nil, x:dtype()) end
function random.randn_like(x) return random.randn(x:shape(), nil, x:dtype()) end

--- dt.randint(low, high, shape [, seed [, dtype = "i64"]]): whole numbers from low to high - 1; as dt.rand. In a forward high - low is
--- at most 2^24, as many as an f32 tells apart.
function random.randint(low, high, shape, seed, dtype)
  local s = traced()
  if not s or type(seed) == "number" then
    if type(seed) == "table" then seed = nil end
    return core.randint(low, high, shape, seed, dtype)
  end
  local n = util.check("dt.randint: high", high, "integer") - util.check("dt.randint: low", low, "integer")
  if n < 1 or n > 1 << 24 then
    util.fail("dt.randint in a forward: %d to %d are %d numbers; 1 to 2^24 can be drawn there", low, high - 1, n)
  end
  local x = core.op("floor", symbol("dt.randint", s, shape, "f32", false, seed) * n)
  return core.op("cast", x, { dtype = dtype or "i64" }) + low
end

--- dt.randperm(n [, seed]): 0 to n - 1 in a random order, i64. Not in a forward.
function random.randperm(n, seed)
  if traced() and not seed then
    util.fail("dt.randperm in a forward would draw once and stay as it is; draw it outside, or give a seed for a constant")
  end
  return core.randperm(n, seed)
end

return random
