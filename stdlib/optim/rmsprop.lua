-- RMSprop (Hinton 2012), centred (Graves 2013) and with momentum, as torch.optim.RMSprop.
local define = require "dtrain.optim.define".define
local ops = require "dtrain.ops"

--- optim.RMSprop{ lr = 1e-2, alpha = 0.99, eps = 1e-8, weight_decay = 0, momentum = 0, centered = false }
return define {
  name = "RMSprop",
  defaults = { lr = 1e-2, alpha = 0.99, eps = 1e-8, weight_decay = 0, momentum = 0, centered = false },
  kinds = { alpha = "fraction", eps = "nonnegative", weight_decay = "nonnegative", momentum = "fraction" },
  state = function(h)
    local list = { "square" }
    if h.centered then list[#list + 1] = "mean" end
    if h.momentum ~= 0 then list[#list + 1] = "momentum" end
    return list
  end,
  update = function(p, g, s, h)
    if h.weight_decay ~= 0 then g = g + p * h.weight_decay end
    s.square = s.square * h.alpha + ops.square(g) * (1 - h.alpha)
    local v = s.square
    if h.centered then
      s.mean = s.mean + (g - s.mean) * (1 - h.alpha)
      v = ops.maximum(v - ops.square(s.mean), 0) -- rounding may leave less than nothing
    end
    local step = g / (ops.sqrt(v) + h.eps)
    if h.momentum ~= 0 then
      s.momentum = s.momentum * h.momentum + step
      step = s.momentum
    end
    return p - step * h.lr
  end,
}
