-- GPT-3's largest model (Brown et al. 2020) on thousands of ranks: 8 on the axis tensor, 8 on the pipeline, the rest data replicas
-- with ZeRO-1 (Narayanan et al. 2021). Nobody needs these ranks to plan for them:
--   dtrain plan examples/strategies/gpt_175b.lua --ranks 4096      what each rank holds and what it sends
--   dtrain explain examples/strategies/gpt_175b.lua --ranks 4096 --rank 4095 --json
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

local stages = {} -- whole blocks, 4 of the 96 in each of 8 x 3 stages
for k = 1, 24 do stages[k] = 4 end

return dt.job {
  model     = nn.GPT { vocab = 51200, layers = 96, heads = 96, width = 12288, context = 2048 },
  loss      = nn.CrossEntropy(),
  data      = data.synthetic { tokens = 51200, context = 2048, samples = 1536 * 1000 },
  batch     = { global = 1536, micro = 1 },
  optimizer = optim.AdamW { lr = 6e-5, weight_decay = 0.1, betas = { 0.9, 0.95 } },
  precision = "bf16",
  clip      = 1.0,
  steps     = 1000,
  parallel  = { tensor = 8, sequence = true, pipeline = 8, schedule = "interleaved", chunks = 3, stages = stages, data = "auto",
    zero = 1, recompute = { communication = true } },
}
