-- Hybrid sharding (Zhao et al. 2023): parameters, gradients and states in shares within groups of 2 neighbours, replicas across the
-- groups.
-- Gathers and reduce-scatters stay within a group; what crosses groups is an all-reduce of a share.
--   mpirun --oversubscribe -n 4 dtrain examples/strategies/hsdp.lua
--   dtrain explain examples/strategies/hsdp.lua --ranks 8    look at: reduce_scatter over shard, then all_reduce of half over replica
--   dtrain plan examples/strategies/hsdp.lua --ranks 8       look at: half of everything, whatever the number of ranks
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data
local hsdp = { name = "hsdp" }
function hsdp.axes()
  return { { name = "replica", size = "auto", splits = "samples" }, { name = "shard", size = 2, splits = "samples" } }
end
function hsdp.keep()
  return { parameters = { "shard" }, gradients = { "shard" }, states = { "shard" }, gather = "use" }
end

return dt.job { model = nn.GPT { vocab = 64, layers = 4, heads = 4, width = 64, context = 32 }, loss = nn.CrossEntropy(),
  data = data.synthetic { tokens = 64, context = 32, samples = 256 }, batch = { global = 16, micro = 2 },
  optimizer = optim.AdamW { lr = 1e-3 }, steps = 20, parallel = { strategies = { hsdp } } }
