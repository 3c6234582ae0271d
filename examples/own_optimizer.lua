-- An optimizer of one's own: a function of parameter, gradient, state and hyperparameters, traced once and run as
-- native code. This is Lion (Chen et al. 2023); optim.Lion is the library's.
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

local Lion = optim.define {
  name = "Lion",
  state = { "m" },
  defaults = { beta1 = 0.9, beta2 = 0.99, weight_decay = 0 },
  update = function(p, g, s, h)
    local u = dt.sign(h.beta1 * s.m + (1 - h.beta1) * g)
    s.m = h.beta2 * s.m + (1 - h.beta2) * g
    return p - h.lr * (u + h.weight_decay * p)
  end,
}

local args = dt.args { lr = 1e-3, epochs = 20 }

return dt.job {
  model     = nn.Sequential { nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 5) },
  loss      = nn.Huber(),
  data      = data.synthetic { inputs = { 10 }, targets = { 5 }, samples = 1000 },
  batch     = 50,
  optimizer = Lion { lr = args.lr, weight_decay = 0.01 },
  schedule  = function(step, total) return 1 - step / total end, -- and a schedule: a factor on lr
  epochs    = args.epochs,
}
