-- Three axes at once: 2 pipeline stages x 2 data replicas x 2 tensor ranks, with ZeRO-1 on the data axis.
--   mpirun --oversubscribe -n 8 dtrain examples/strategies/mesh_3d.lua
--   dtrain explain examples/strategies/mesh_3d.lua --ranks 8              what rank 0 sends, over which axis, and why
--   dtrain check examples/strategies/mesh_3d.lua --ranks 8                the proof that it equals one process
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

return dt.job {
  model     = nn.GPT { vocab = 64, layers = 2, heads = 4, width = 32, context = 32 },
  loss      = nn.CrossEntropy(),
  data      = data.synthetic { tokens = 64, context = 32, samples = 256 },
  batch     = { global = 16, micro = 2 },
  optimizer = optim.AdamW { lr = 1e-3 },
  clip      = 1.0,
  steps     = 10,
  parallel  = { mesh = { "pipeline", "data", "tensor" }, pipeline = 2, data = 2, tensor = 2, sequence = true, zero = 1,
    schedule = "1f1b" },
}
