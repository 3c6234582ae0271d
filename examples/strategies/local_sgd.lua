-- DiLoCo: replicas take 10 steps by themselves, then an outer optimizer steps towards their mean.
--   mpirun -n 2 dtrain examples/strategies/local_sgd.lua        look at: no collective of gradients in
--   dtrain explain examples/strategies/local_sgd.lua --ranks 2
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

return dt.job {
  model = nn.Sequential { nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4) },
  loss = nn.MSE(),
  data = data.synthetic { inputs = { 32 }, targets = { 4 }, samples = 1024 },
  batch = 64,
  optimizer = optim.AdamW { lr = 1e-3 },
  steps = 100,
  parallel = { sync = { every = 10, outer = optim.SGD { lr = 0.7, momentum = 0.9, nesterov = true } } },
}
