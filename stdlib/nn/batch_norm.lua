-- BatchNorm2d: normalises each channel over the microbatch, keeps running statistics for evaluation.
-- Across ranks each uses its own microbatch; with each step the running statistics become their mean over the replicas (the pass
-- totals), so that all ranks evaluate and save the same numbers.
local core = require "dtrain.core"
local init = require "dtrain.nn.initializer"
local M = require "dtrain.nn.module"
local ops = require "dtrain.ops"
local parameter = require "dtrain.nn.parameter"
local scope = require "dtrain.nn.scope"
local util = require "dtrain.util"

local BatchNorm2d = M.module("BatchNorm2d")

--- nn.BatchNorm2d(channels, { eps = 1e-5, momentum = 0.1, sync = false }) (Ioffe and Szegedy 2015): x[N, channels, H,
--- W]. running = (1 - momentum) * running + momentum * batch, with the unbiased variance, as in PyTorch. sync = true:
--- statistics of the microbatches of all replicas together, so that the result is that of one process with the whole.
function BatchNorm2d:init(channels, options)
  util.check("nn.BatchNorm2d: channels", channels, "count")
  local o = util.options("nn.BatchNorm2d", options, { { "eps", "positive", 1e-5 }, { "momentum", "fraction", 0.1 },
    { "sync", "boolean", false } })
  self.channels, self.eps, self.momentum, self.sync = channels, o.eps, o.momentum, o.sync
  self.weight = parameter.parameter({ channels }, init.ones())
  self.bias = parameter.parameter({ channels }, init.zeros())
  self.running_mean = parameter.buffer({ channels }, init.zeros())
  self.running_var = parameter.buffer({ channels }, init.ones())
end

-- Normalised by the statistics of all replicas; also these, and how many values they are over.
local function together(self, x, axes, n)
  local c = self.channels
  local function mean_of(v) return v:mean({ 0, 2, 3 }):all_reduce(axes, "mean") end
  local wide = x:to "f32"
  local mean = mean_of(wide)
  local apart = wide - mean:reshape { 1, c, 1, 1 }
  local var = mean_of(ops.square(apart))
  local y = apart * (ops.rsqrt(var + self.eps) * self.weight):reshape { 1, c, 1, 1 } + self.bias:reshape { 1, c, 1, 1 }
  return y:to(x:dtype()), mean, var, n * core.axes_size(x, axes)
end

local function values(x)
  local n = 1
  for i, d in ipairs(x:shape()) do if i ~= 2 then n = n * d end end
  return n
end

function BatchNorm2d:forward(x)
  local training = scope.is_training()
  local axes = training and self.sync and core.is_symbolic(x) and core.sample_axes(x) or {}
  local n = values(x)
  local y, mean, var
  if #axes > 0 then
    y, mean, var, n = together(self, x, axes, n)
  else
    local rstd
    y, mean, rstd = ops.batch_norm(x, self.weight, self.bias, self.running_mean, self.running_var,
      { training = training, eps = self.eps })
    var = training and ops.reciprocal(ops.square(rstd)) - self.eps
  end
  if not training then return y end
  if n == 1 then
    util.fail("nn.BatchNorm2d: a microbatch of one sample of 1 x 1 has one value a channel, whose variance is 0: the layer's output "
      .. "would be its bias, and nothing before it would train; make the microbatch larger (batch), or let the model evaluate")
  end
  local m, unbiased = self.momentum, n / (n - 1)
  M.assign(self, "running_mean", self.running_mean * (1 - m) + mean * m)
  M.assign(self, "running_var", self.running_var * (1 - m) + var * (m * unbiased))
  return y
end

function BatchNorm2d:extra() return ("%d"):format(self.channels) end

return BatchNorm2d
