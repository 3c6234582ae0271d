-- ZeRO-3: parameters, gradients and optimizer states in shares.
--   dtrain plan examples/strategies/zero3.lua --ranks 4       look at: parameters, gradients and states are a quarter of what
--                                                             --zero 0 says; communication buffers are the gathers in flight
--   dtrain explain examples/strategies/zero3.lua --ranks 4    look at: each bucket's gather, one ahead of its use
--   mpirun -n 2 dtrain examples/strategies/zero3.lua
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

local args = dt.args { zero = 3, width = 128, layers = 4 }

return dt.job {
  model = nn.GPT { vocab = 256, layers = args.layers, heads = 4, width = args.width, context = 64 },
  loss = nn.CrossEntropy(),
  data = data.synthetic { tokens = 256, context = 64, samples = 512 },
  batch = { global = 16, micro = 2 },
  optimizer = optim.AdamW { lr = 1e-3 },
  precision = "bf16",
  clip = 1.0,
  steps = 20,
  parallel = { zero = args.zero, resident = args.zero == 3 and 1000 or nil, gradient = { bucket_mb = 1 } },
}
