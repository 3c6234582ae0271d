-- Losses, as functions and as modules: (output, targets) -> mean loss (0-dim) [, count]. The mean is over all
-- elements, or over the labels that count; where `count` comes back, a step weighs microbatches by it, else by their
-- samples.
local M = require "dtrain.nn.module"
local ops = require "dtrain.ops"
local util = require "dtrain.util"

local loss = {}

local function same_shape(what, y, t)
  local a, b = y:shape(), t:shape()
  local same = #a == #b
  for i = 1, #a do same = same and a[i] == b[i] end
  if not same then
    util.fail("%s: the output is %s, the targets are %s; their shapes must be equal (reshape one)", what, util.show(a),
      util.show(b))
  end
end

--- Mean of (y - t)^2.
function loss.mse(y, t)
  same_shape("mse", y, t)
  return ops.mean(ops.square(y - t))
end

--- Mean of |y - t|.
function loss.l1(y, t)
  same_shape("l1", y, t)
  return ops.mean(ops.abs(y - t))
end

--- Mean of d^2 / 2 where |d| <= delta, else delta (|d| - delta / 2) (Huber 1964); delta defaults to 1.
function loss.huber(y, t, delta)
  if type(delta) == "table" then delta = delta.delta end
  delta = delta or 1
  same_shape("huber", y, t)
  local d = y - t
  local size = ops.abs(d)
  return ops.mean(ops.where(ops.le(size, delta), ops.square(d) * 0.5, (size - 0.5 * delta) * delta))
end

--- Huber divided by beta: PyTorch's smooth L1.
function loss.smooth_l1(y, t, beta)
  if type(beta) == "table" then beta = beta.beta end
  return loss.huber(y, t, beta or 1) / (beta or 1)
end

--- Mean over the valid labels of -log softmax(logits)[label], and the number of valid labels.
--- logits[..., C], labels[...] of whole numbers from 0; options: ignore_index (-100), label_smoothing (0).
function loss.cross_entropy(logits, labels, options) return ops.cross_entropy(logits, labels, options) end

--- Mean of the binary cross entropy of sigmoid(x) and t in [0, 1]: t log(1 + e^-x) + (1 - t) log(1 + e^x), which neither overflows nor
--- loses the digits of a small loss.
function loss.bce_with_logits(x, t)
  same_shape("bce_with_logits", x, t)
  return ops.mean(t * ops.softplus(-x) + (1 - t) * ops.softplus(x))
end

local function of_function(name, f, spec)
  local class = M.module(name)
  function class:init(options) self.options = util.options("nn." .. name, options, spec) end
  function class:forward(y, t) return f(y, t, self.options) end
  function class:extra()
    local parts = {}
    for _, row in ipairs(spec) do parts[#parts + 1] = ("%s = %g"):format(row[1], self.options[row[1]]) end
    return table.concat(parts, ", ")
  end
  return class
end

loss.MSE = of_function("MSE", loss.mse, {})
loss.L1 = of_function("L1", loss.l1, {})
--- nn.Huber{ delta = 1 }
loss.Huber = of_function("Huber", loss.huber, { { "delta", "positive", 1 } })
--- nn.SmoothL1{ beta = 1 }
loss.SmoothL1 = of_function("SmoothL1", loss.smooth_l1, { { "beta", "positive", 1 } })
--- nn.CrossEntropy{ ignore_index = -100, label_smoothing = 0 }
loss.CrossEntropy = of_function("CrossEntropy", loss.cross_entropy,
  { { "ignore_index", "integer", -100 }, { "label_smoothing", "fraction", 0 } })
loss.BCEWithLogits = of_function("BCEWithLogits", loss.bce_with_logits, {})

return loss
