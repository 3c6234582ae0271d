-- Initial values of parameters, as data: the executor draws them by (seed, name), the same on every rank.
-- Names and formulas as in torch.nn.init.
local util = require "dtrain.util"

local init = {}

function init.zeros() return { "zeros" } end
function init.ones() return { "ones" } end
function init.constant(v) return { "const", util.check("nn.init.constant", v, "number") } end

--- Uniform in [a, b).
function init.uniform(a, b)
  return { "uniform", util.check("nn.init.uniform", a, "number"), util.check("nn.init.uniform", b, "number") }
end

--- Normal with mean and standard deviation.
function init.normal(mean, std)
  return { "normal", util.check("nn.init.normal", mean, "number"), util.check("nn.init.normal", std, "number") }
end

-- fan in and fan out of a weight [out, in, kernel...]
local function fans(shape)
  local area = 1
  for i = 3, #shape do area = area * shape[i] end
  return shape[2] * area, shape[1] * area
end

--- PyTorch's default of Linear and Conv2d: kaiming uniform with a = sqrt(5), which is U(-1/sqrt(fan in), 1/sqrt(fan
--- in)) (He et al. 2015).
function init.default(fan_in)
  local bound = fan_in > 0 and 1 / math.sqrt(fan_in) or 0
  return { "uniform", -bound, bound }
end

--- Kaiming normal for relu: std sqrt(2 / fan in) (He et al. 2015).
function init.kaiming_normal(shape)
  local fan_in = fans(shape)
  return { "normal", 0, math.sqrt(2 / fan_in) }
end

--- Kaiming uniform for relu: bound sqrt(6 / fan in).
function init.kaiming_uniform(shape)
  local bound = math.sqrt(6 / (fans(shape)))
  return { "uniform", -bound, bound }
end

--- Xavier uniform: bound sqrt(6 / (fan in + fan out)) (Glorot and Bengio 2010).
function init.xavier_uniform(shape)
  local a, b = fans(shape)
  local bound = math.sqrt(6 / (a + b))
  return { "uniform", -bound, bound }
end

--- Xavier normal: std sqrt(2 / (fan in + fan out)).
function init.xavier_normal(shape)
  local a, b = fans(shape)
  return { "normal", 0, math.sqrt(2 / (a + b)) }
end

return init
