-- ZeRO-1 (Rajbhandari et al. 2020) from the verbs: every rank keeps its share of each bucket's optimizer states,
-- updates that share, and gathers what the others updated. States are saved once and loaded by any number of ranks.
--   mpirun -n 2 dtrain examples/strategies/zero1_from_scratch.lua --out runs/z1
--   mpirun -n 4 dtrain examples/strategies/zero1_from_scratch.lua --out runs/z1 --resume auto --steps 40
--   dtrain plan examples/strategies/zero1_from_scratch.lua --ranks 4     look at: optimizer states, a quarter
--   dtrain explain examples/strategies/zero1_from_scratch.lua --ranks 4  look at: as many bytes as one all-reduce of the gradients
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

local zero1 = {
  name = "zero1",
  axes = function() return { { name = "replica", size = "auto", splits = "samples" } } end,
  keep = function() return { states = { "replica" } } end,
  reduce = function(bucket) return bucket:reduce_scatter "replica" end,
  gather = function(share) return share:all_gather "replica" end,
}

return dt.job {
  model = nn.GPT { vocab = 64, layers = 4, heads = 4, width = 64, context = 32 },
  loss = nn.CrossEntropy(),
  data = data.synthetic { tokens = 64, context = 32, samples = 256 },
  batch = { global = 16, micro = 2 },
  optimizer = optim.AdamW { lr = 1e-3 },
  clip = 1.0,
  steps = 20,
  parallel = { strategies = { zero1 } },
}
