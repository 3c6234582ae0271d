-- An exponential moving average of the parameters, kept beside them: a state of each parameter that the update writes. It is saved in
-- checkpoints, and under ZeRO it lies in shares like any other state.
--   dtrain examples/strategies/ema.lua --out runs/ema
--   mpirun -n 2 dtrain examples/strategies/ema.lua --parallel zero=1
--   dtrain plan examples/strategies/ema.lua --ranks 2 --parallel zero=1   look at: optimizer states, half of three times the
--   parameters
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data
local ema = { name = "ema", options = { { "decay", "number", 0.99 } } }
function ema.update(entry, _, p)
  local new = entry:optimizer(entry.grad)
  local mean = entry:state("ema", entry.param)
  entry:assign(mean, p.decay * mean + (1 - p.decay) * new)
  return new
end

return dt.job { model = nn.Sequential { nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10) }, loss = nn.CrossEntropy(),
  data = data.synthetic { inputs = { 32 }, classes = 10, samples = 512 }, batch = 32,
  optimizer = optim.AdamW { lr = 1e-3 }, steps = 40, parallel = { strategies = { ema } } }
