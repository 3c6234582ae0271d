-- LayerNorm and RMSNorm, over the last dims.
local M = require "dtrain.nn.module"
local ops = require "dtrain.ops"
local parameter = require "dtrain.nn.parameter"
local init = require "dtrain.nn.initializer"
local util = require "dtrain.util"

local LayerNorm, RMSNorm = M.module("LayerNorm"), M.module("RMSNorm")

local function shape_of(what, shape)
  if type(shape) == "number" then shape = { shape } end
  util.check(what .. ": shape", shape, "table")
  if #shape == 0 then util.fail("%s: the shape is empty; give the size of the last dim", what) end
  for _, d in ipairs(shape) do util.check(what .. ": shape", d, "count") end
  return shape
end

--- nn.LayerNorm(width or shape, { eps = 1e-5, bias = true, affine = true }) (Ba et al. 2016): the last dims are
--- `shape`.
function LayerNorm:init(shape, options)
  local o = util.options("nn.LayerNorm", options, { { "eps", "nonnegative", 1e-5 }, { "bias", "boolean", true },
    { "affine", "boolean", true, alias = "elementwise_affine" } })
  self.shape, self.eps = shape_of("nn.LayerNorm", shape), o.eps
  if o.affine then
    self.weight = parameter.parameter(self.shape, init.ones())
    if o.bias then self.bias = parameter.parameter(self.shape, init.zeros()) end
  end
end

function LayerNorm:forward(x)
  local attrs, w, b = { dims = #self.shape, eps = self.eps }, self.weight, self.bias
  if b then return ops.layer_norm(x, w, b, attrs) end
  if w then return ops.layer_norm(x, w, attrs) end
  return ops.layer_norm(x, attrs)
end

function LayerNorm:extra() return table.concat(self.shape, ", ") end

--- nn.RMSNorm(width or shape, { eps = 1e-6 }) (Zhang and Sennrich 2019).
function RMSNorm:init(shape, options)
  local o = util.options("nn.RMSNorm", options, { { "eps", "nonnegative", 1e-6 }, { "affine", "boolean", true,
    alias = "elementwise_affine" } })
  self.shape, self.eps = shape_of("nn.RMSNorm", shape), o.eps
  if o.affine then self.weight = parameter.parameter(self.shape, init.ones()) end
end

function RMSNorm:forward(x)
  local attrs, w = { dims = #self.shape, eps = self.eps }, self.weight
  if w then return ops.rms_norm(x, w, attrs) end
  return ops.rms_norm(x, attrs)
end

function RMSNorm:extra() return table.concat(self.shape, ", ") end

return { LayerNorm = LayerNorm, RMSNorm = RMSNorm }
