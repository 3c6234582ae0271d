-- Adagrad (Duchi et al. 2011), as torch.optim.Adagrad.
local define = require "dtrain.optim.define".define
local ops = require "dtrain.ops"

--- optim.Adagrad{ lr = 1e-2, lr_decay = 0, weight_decay = 0, initial_accumulator_value = 0, eps = 1e-10 }
return define {
  name = "Adagrad",
  defaults = { lr = 1e-2, lr_decay = 0, weight_decay = 0, initial_accumulator_value = 0, eps = 1e-10 },
  kinds = { lr_decay = "nonnegative", weight_decay = "nonnegative", initial_accumulator_value = "nonnegative", eps = "nonnegative" },
  state = { "sum" },
  fill = { sum = "initial_accumulator_value" },
  update = function(p, g, s, h)
    if h.weight_decay ~= 0 then g = g + p * h.weight_decay end
    local lr = h.lr
    if h.lr_decay ~= 0 then lr = lr / (1 + (h.t - 1) * h.lr_decay) end
    s.sum = s.sum + ops.square(g)
    return p - g / (ops.sqrt(s.sum) + h.eps) * lr
  end,
}
