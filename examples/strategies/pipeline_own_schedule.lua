-- A pipeline with a schedule of one's own, in ten lines.   dtrain explain examples/strategies/pipeline_own_schedule.lua --ranks 4
-- Look at the chart: every stage runs what forwards it can before its first backward is ready, and one of each from then on. Twice
-- 1F1B's forwards are in flight on the first stages, and the bubble is the same: change the 2 to 1 and look again. Then run it:
--   mpirun -n 4 dtrain examples/strategies/pipeline_own_schedule.lua
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

local args = dt.args { pipeline = 4, steps = 20 }

local function eager(stage, stages, micro)
  local ahead, order = 2 * (stages - 1 - stage), {}
  for i = 1, micro + ahead do
    if i <= micro then order[#order + 1] = { "F", i } end
    if i > ahead then order[#order + 1] = { "B", i - ahead } end
  end
  return order
end

return dt.job {
  model = nn.GPT { vocab = 64, layers = 8, heads = 4, width = 64, context = 64 },
  loss = nn.CrossEntropy(),
  data = data.synthetic { tokens = 64, context = 64, samples = 512 },
  batch = { global = 16, micro = 2 },
  optimizer = optim.AdamW { lr = 1e-3 },
  steps = args.steps,
  parallel = { pipeline = args.pipeline, schedule = eager },
}
