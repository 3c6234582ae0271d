-- ZB-V (Qi et al. 2024): each rank has two chunks of the model, placed in a V (rank 0 has the first and the last stage), and weight
-- gradients fill the gaps: from 2 ranks - 1 microbatches on no rank idles between its first and its last action, with 1F1B's memory.
--   mpirun --oversubscribe -n 4 dtrain examples/strategies/zb_v.lua
--   dtrain explain examples/strategies/zb_v.lua --ranks 4     look at: the chart, no gap inside of a row
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data
local zb_v = { chunks = 2 }
function zb_v.place(stage, ranks) return stage < ranks and stage or 2 * ranks - 1 - stage end
function zb_v.order(rank, ranks, micro)
  local out, done, most, left = {}, {}, math.max(2 * ranks - 1, micro), ranks - rank
  local function put(n, ...) -- n times what "F1 B2" are: the next microbatch's F in chunk 1, B in 2; a small step leaves some out
    for i = 1, n * select("#", ...) do
      local what = select((i - 1) % select("#", ...) + 1, ...)
      done[what] = (done[what] or 0) + 1
      if done[what] <= micro then out[#out + 1] = { what:sub(1, 1), done[what], tonumber(what:sub(2)) } end
    end
  end
  put(2 * left - 1, "F1") put(rank, "F2", "F1") put(left, "F2", "B2", "W2")
  put(most - ranks, "F1", "B1", "W1", "F2", "B2", "W2")
  put(rank, "B1", "B2") put(left, "B1", "W1") put(rank, "W2") put(rank, "W1")
  return out
end

return dt.job { model = nn.GPT { vocab = 64, layers = 16, heads = 4, width = 32, context = 16 }, loss = nn.CrossEntropy(),
  data = data.synthetic { tokens = 64, context = 16, samples = 256 }, batch = { global = 32, micro = 2 }, steps = 10,
  optimizer = optim.AdamW { lr = 1e-3 }, parallel = { pipeline = dt.args({ pipeline = 4 }).pipeline, schedule = zb_v } }
