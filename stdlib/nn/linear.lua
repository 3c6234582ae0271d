-- Linear: y = x w^T + b.
local init = require "dtrain.nn.initializer"
local M = require "dtrain.nn.module"
local ops = require "dtrain.ops"
local parameter = require "dtrain.nn.parameter"
local util = require "dtrain.util"

local Linear = M.module("Linear")

--- nn.Linear(inputs, outputs, { bias = true, init =, bias_init =, place = }): x[..., inputs] -> [..., outputs].
--- weight [outputs, inputs] and bias [outputs] begin as U(-1/sqrt(inputs), 1/sqrt(inputs)), as in PyTorch.
function Linear:init(inputs, outputs, options)
  util.check("nn.Linear: inputs", inputs, "count")
  util.check("nn.Linear: outputs", outputs, "count")
  local o = util.options("nn.Linear", options,
    { { "bias", "boolean", true }, { "init", "table" }, { "bias_init", "table" }, { "place", "table" } })
  self.inputs, self.outputs = inputs, outputs
  self.weight = parameter.parameter({ outputs, inputs }, o.init or init.default(inputs))
  if o.bias then self.bias = parameter.parameter({ outputs }, o.bias_init or init.default(inputs)) end
  parameter.place(self, o.place)
end

function Linear:forward(x)
  local bias = self.bias
  if bias then return ops.linear(x, self.weight, bias, { bias = true }) end
  return ops.linear(x, self.weight)
end

function Linear:extra()
  return ("%d, %d%s"):format(self.inputs, self.outputs, rawget(self, "_params").bias and "" or ", bias = false")
end

return Linear
