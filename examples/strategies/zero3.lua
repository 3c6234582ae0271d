-- ZeRO-3: parameters, gradients and optimizer states are divided over the data ranks; each bucket of parameters is
-- gathered before its use and dropped after it.
--   mpirun -n 2 dtrain examples/strategies/zero3.lua
--   dtrain plan examples/strategies/zero3.lua --ranks 4                     states: a quarter; buffers: two buckets
--   dtrain plan examples/strategies/zero3.lua --ranks 4 --parallel zero=0   the same with plain data parallelism
--   dtrain explain examples/strategies/zero3.lua --ranks 4                  every gather and reduce-scatter, and why
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

return dt.job {
  model     = nn.GPT { vocab = 256, layers = 6, heads = 6, width = 384, context = 128 },
  loss      = nn.CrossEntropy(),
  data      = data.synthetic { tokens = 256, context = 128, samples = 512 },
  batch     = { global = 8, micro = 2 },
  optimizer = optim.AdamW { lr = 3e-4, weight_decay = 0.1 },
  clip      = 1.0,
  steps     = 20,
  parallel  = { data = "auto", zero = 3, gradient = { bucket_mb = 8 } },
}
