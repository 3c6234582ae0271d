-- BatchNorm2d: normalises each channel over the microbatch, keeps running statistics for evaluation.
-- Across ranks each uses its own microbatch; before an evaluation or a checkpoint the engine averages the running
-- statistics, so that all ranks evaluate and save the same numbers.
local init = require "dtrain.nn.initializer"
local M = require "dtrain.nn.module"
local ops = require "dtrain.ops"
local parameter = require "dtrain.nn.parameter"
local scope = require "dtrain.nn.scope"
local util = require "dtrain.util"

local BatchNorm2d = M.module("BatchNorm2d")

--- nn.BatchNorm2d(channels, { eps = 1e-5, momentum = 0.1 }) (Ioffe and Szegedy 2015): x[N, channels, H, W].
--- running = (1 - momentum) * running + momentum * batch, with the unbiased variance, as in PyTorch.
function BatchNorm2d:init(channels, options)
  util.check("nn.BatchNorm2d: channels", channels, "count")
  local o = util.options("nn.BatchNorm2d", options, { { "eps", "positive", 1e-5 }, { "momentum", "fraction", 0.1 } })
  self.channels, self.eps, self.momentum = channels, o.eps, o.momentum
  self.weight = parameter.parameter({ channels }, init.ones())
  self.bias = parameter.parameter({ channels }, init.zeros())
  self.running_mean = parameter.buffer({ channels }, init.zeros())
  self.running_var = parameter.buffer({ channels }, init.ones())
end

function BatchNorm2d:forward(x)
  local training = scope.is_training()
  local y, mean, rstd = ops.batch_norm(x, self.weight, self.bias, self.running_mean, self.running_var,
    { training = training, eps = self.eps })
  if training then
    local n = 1
    for i, d in ipairs(x:shape()) do if i ~= 2 then n = n * d end end
    if n == 1 then
      util.fail("nn.BatchNorm2d: a microbatch of one sample of 1 x 1 has one value a channel, whose variance is 0: the layer's output "
        .. "would be its bias, and nothing before it would train; make the microbatch larger (batch), or let the model evaluate")
    end
    local var = ops.reciprocal(ops.square(rstd)) - self.eps
    local m, unbiased = self.momentum, n / (n - 1)
    M.assign(self, "running_mean", self.running_mean * (1 - m) + mean * m)
    M.assign(self, "running_var", self.running_var * (1 - m) + var * (m * unbiased))
  end
  return y
end

function BatchNorm2d:extra() return ("%d"):format(self.channels) end

return BatchNorm2d
