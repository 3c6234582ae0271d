-- GPT-2 of 124 million parameters, traced once and compiled for one strategy after another, as a planner does:
--   dtrain plan tests/bench/compile.lua     the time that a rank's plan takes, the least of several tries; last the slowest strategy's
local dt = require "dtrain"
local core = require "dtrain.core"
local strategies = require "dtrain.strategy"
local trace = require "dtrain.trace"
local nn, optim, data = dt.nn, dt.optim, dt.data

local args = dt.args { ranks = 8, tries = 7 }
local job = dt.job {
  model = nn.GPT { vocab = 50257, layers = 12, heads = 12, width = 768, context = 1024 }, loss = nn.CrossEntropy(),
  data = data.synthetic { tokens = 50257, context = 1024, samples = 1024 }, batch = { global = 64, micro = 2 }, clip = 1.0,
  optimizer = optim.AdamW { lr = 6e-4, betas = { 0.9, 0.95 }, weight_decay = 0.1 }, steps = 1,
}

local traced = {}
local function compile(parallel)
  job.parallel = strategies.new(parallel)
  local where = job:where_is(args.ranks - 1, args.ranks)
  local begin = os.clock()
  trace.train(job, { rows = 2, where = where, threads = core.threads(), micros = { 64 // (2 * where.replicas) },
    traced = traced })
  return (os.clock() - begin) * 1e6
end

compile {} -- traces
local worst = 0
for _, parallel in ipairs { {}, { zero = 1 }, { zero = 3 }, { tensor = 2 }, { pipeline = 2 },
  { tensor = 2, pipeline = 2, zero = 1 } } do
  local best = math.huge
  for _ = 1, args.tries do best = math.min(best, compile(parallel)) end
  worst = math.max(worst, best)
  local words = {}
  for _, name in ipairs { "zero", "tensor", "pipeline" } do
    if parallel[name] then words[#words + 1] = ("%s=%d"):format(name, parallel[name]) end
  end
  print(("%-28s %8.0f us"):format(#words > 0 and table.concat(words, ",") or "data", best))
end
print(("RESULT step_us=%.0f"):format(worst))
job.parallel = strategies.new {}
return job
