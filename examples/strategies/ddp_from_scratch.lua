-- Data parallelism in a dozen lines: an axis whose ranks have samples of their own, buckets of about 64 KB in the order
-- in which backward finishes their gradients, and one all-reduce for each, which overlaps with the rest of backward.
--   mpirun -n 2 dtrain examples/strategies/ddp_from_scratch.lua
--   dtrain explain examples/strategies/ddp_from_scratch.lua --ranks 4    look at: what each bucket's all-reduce overlaps with
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data
local ddp = { name = "ddp" }
function ddp.axes() return { { name = "replica", size = "auto", splits = "samples" } } end
function ddp.buckets(parameters)
  local list, room = {}, 0
  for _, q in ipairs(parameters) do
    if room < q.bytes then list[#list + 1], room = {}, 65536 end
    table.insert(list[#list], q.name)
    room = room - q.bytes
  end
  return list
end
function ddp.reduce(bucket) return bucket:all_reduce "replica" end

return dt.job { model = nn.GPT { vocab = 64, layers = 4, heads = 4, width = 64, context = 32 }, loss = nn.CrossEntropy(),
  data = data.synthetic { tokens = 64, context = 32, samples = 256 }, batch = { global = 16, micro = 2 },
  optimizer = optim.AdamW { lr = 1e-3 }, steps = 20, parallel = { strategies = { ddp } } }
