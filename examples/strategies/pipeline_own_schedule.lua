-- A pipeline with a schedule of one's own: which microbatch a stage runs when, as a function. It is checked before the
-- run: every microbatch once, no deadlock, how many are in flight.
--   mpirun -n 2 dtrain examples/strategies/pipeline_own_schedule.lua
--   dtrain explain examples/strategies/pipeline_own_schedule.lua --ranks 2     the chart, and the share of the bubble
--   dtrain explain ... --parallel schedule=1f1b                                against the usual one
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

-- Pairs: two forwards, then their two backwards, once the pipeline is full.
local function pairs_of_two(stage, stages, micro)
  local order, ahead = {}, math.min(2 * math.ceil((stages - stage) / 2), micro)
  local f, b = 0, 0
  while b < micro do
    local want = math.min(micro, f < ahead and ahead or f + 2)
    while f < want do f = f + 1 order[#order + 1] = { "F", f } end
    for _ = 1, math.min(2, micro - b) do b = b + 1 order[#order + 1] = { "B", b } end
  end
  return order
end

return dt.job {
  model     = nn.GPT { vocab = 256, layers = 4, heads = 4, width = 128, context = 64 },
  loss      = nn.CrossEntropy(),
  data      = data.synthetic { tokens = 256, context = 64, samples = 256 },
  batch     = { global = 16, micro = 2 },
  optimizer = optim.AdamW { lr = 1e-3 },
  steps     = 20,
  parallel  = { pipeline = 2, schedule = pairs_of_two },
}
