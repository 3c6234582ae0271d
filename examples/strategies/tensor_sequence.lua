-- Tensor and sequence parallelism: the layers' products are divided over the ranks, and between them the sequence is.
-- The model says nothing of it: the strategy reads the traced graph.
--   mpirun -n 2 dtrain examples/strategies/tensor_sequence.lua
--   dtrain explain examples/strategies/tensor_sequence.lua --ranks 2   all-gather and reduce-scatter around each pair of
--                                                                      products; no logits are gathered for the loss
--   DT_DUMP=place dtrain plan examples/strategies/tensor_sequence.lua --ranks 2     the graph before and after
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

return dt.job {
  model     = nn.GPT { vocab = 251, layers = 4, heads = 4, kv_heads = 2, width = 128, context = 64, positions = "rotary" },
  loss      = nn.CrossEntropy(),
  data      = data.synthetic { tokens = 251, context = 64, samples = 256 }, -- 251: the last rank's rows are padded
  batch     = 8,
  optimizer = optim.AdamW { lr = 1e-3 },
  steps     = 20,
  parallel  = { tensor = 2, sequence = true },
}
