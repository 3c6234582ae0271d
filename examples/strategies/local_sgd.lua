-- Local SGD: ranks take steps of their own and meet every 8 steps. With an outer optimizer on what they moved together
-- it is DiLoCo (Douillard et al. 2023).
--   mpirun -n 2 dtrain examples/strategies/local_sgd.lua
--   mpirun -n 2 dtrain examples/strategies/local_sgd.lua --diloco
--   dtrain explain examples/strategies/local_sgd.lua --ranks 2     one all-reduce of the parameters, every 8 steps
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

local args = dt.args { diloco = false }

return dt.job {
  model     = nn.Sequential { nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10) },
  loss      = nn.CrossEntropy(),
  data      = data.synthetic { inputs = { 32 }, classes = 10, samples = 512 },
  batch     = 32,
  optimizer = optim.AdamW { lr = 1e-3 },
  steps     = 48,
  parallel  = { sync = { every = 8,
    outer = args.diloco and optim.SGD { lr = 0.7, momentum = 0.9, nesterov = true } or nil } },
}
