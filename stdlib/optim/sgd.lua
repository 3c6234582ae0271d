-- SGD with momentum, dampening and Nesterov's form, as torch.optim.SGD.
local define = require "dtrain.optim.define".define
local ops = require "dtrain.ops"
local util = require "dtrain.util"

--- optim.SGD{ lr = 1e-3, momentum = 0, dampening = 0, nesterov = false, weight_decay = 0 }
return define {
  name = "SGD",
  defaults = { lr = 1e-3, momentum = 0, dampening = 0, nesterov = false, weight_decay = 0 },
  kinds = { momentum = "fraction", dampening = "fraction", weight_decay = "nonnegative" },
  check = function(h)
    if h.nesterov and (h.momentum <= 0 or h.dampening ~= 0) then
      util.fail("optim.SGD: nesterov needs momentum above 0 and dampening 0")
    end
  end,
  state = function(h) return h.momentum ~= 0 and { "momentum" } or {} end,
  update = function(p, g, s, h)
    if h.weight_decay ~= 0 then g = g + p * h.weight_decay end
    if h.momentum ~= 0 then
      local m = s.momentum * h.momentum + g * (1 - h.dampening)
      if h.dampening ~= 0 then m = ops.where(ops.eq(h.t, 1), g, m) end -- the first gradient counts in full
      s.momentum = m
      g = h.nesterov and g + m * h.momentum or m
    end
    return p - g * h.lr
  end,
}
