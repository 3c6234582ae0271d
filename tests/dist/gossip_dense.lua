-- Gossip on a ring (examples/strategies/gossip.lua) by a matrix: each replica gathers the parameters of all and weighs them by its
-- own row. It sends more, and must give the same:
--   dtrain check examples/strategies/gossip.lua --ranks n --reference tests/dist/gossip_dense.lua
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data
local dense = { name = "dense", replicas = "differ" }
function dense.axes() return { { name = "ring", size = "auto", splits = "samples" } } end
function dense.reduce(bucket, info) return bucket * info.ranks end
function dense.update(entry)
  local all = entry:optimizer(entry.grad):reshape({ 1, -1 }):all_gather "ring"
  local n = all:size(0)
  local own = (all:sum(1) * 0 + dt.arange(n):to "f32"):reduce_scatter("ring", "mean") -- this replica's number
  local row = 0
  for by = -1, 1 do row = row + dt.one_hot(((own + (n + by)) - dt.floor((own + (n + by)) / n) * n):to "i64", n):to "f32" end
  return (row / 3):matmul(all):reshape(entry.shape)
end

return dt.job { model = nn.Sequential { nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10) }, loss = nn.CrossEntropy(),
  data = data.synthetic { inputs = { 32 }, classes = 10, samples = 512 }, batch = 32,
  optimizer = optim.SGD { lr = 0.1, momentum = 0.9 }, steps = 40, parallel = { strategies = { dense } } }
