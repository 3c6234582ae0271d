-- Gossip (Lian et al. 2017, D-PSGD on a ring): each replica steps by itself, then takes the mean of its parameters and its two
-- neighbours'.
-- Nothing is ever reduced over all ranks, and replicas differ.
--   mpirun --oversubscribe -n 4 dtrain examples/strategies/gossip.lua
--   dtrain explain examples/strategies/gossip.lua --ranks 4   look at: shifts to neighbours, no all_reduce of gradients
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data
local gossip = { name = "gossip", replicas = "differ" }
function gossip.axes() return { { name = "ring", size = "auto", splits = "samples" } } end
function gossip.reduce(bucket, info) return bucket * info.ranks end -- a replica's own gradient instead of the mean
function gossip.update(entry)
  local new = entry:optimizer(entry.grad)
  return (new + new:shift { axis = "ring", by = 1 } + new:shift { axis = "ring", by = -1 }) / 3
end

return dt.job { model = nn.Sequential { nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10) }, loss = nn.CrossEntropy(),
  data = data.synthetic { inputs = { 32 }, classes = 10, samples = 512 }, batch = 32,
  optimizer = optim.SGD { lr = 0.1, momentum = 0.9 }, steps = 40, parallel = { strategies = { gossip } } }
