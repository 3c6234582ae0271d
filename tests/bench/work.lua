-- One piece of work, timed from inside:  dtrain tests/bench/work.lua --work gpt [--count 10]
-- Steps are those of an ordinary job; rank 0 prints the median step time (short steps are timed in groups) and the peak
-- memory of the process.
local dt = require "dtrain"
local core = require "dtrain.core"
local nn, optim, data = dt.nn, dt.optim, dt.data

local args = dt.args {
  work = { default = "gpt", choices = { "gpt", "mlp4", "linear", "mlp128", "cnn" } },
  count = { default = 9, help = "groups of steps to time" },
  ranks = { default = 1, help = "for works whose batch is a rank's" },
  precision = "f32",
  micro = { default = 0, help = "samples of a microbatch; 0: a rank's whole part" },
}

local function cross_entropy(model, shape, optimizer)
  return { model = model, loss = nn.CrossEntropy(), data = data.synthetic { inputs = shape, classes = 10, samples = 320 },
    batch = 64, optimizer = optimizer }
end

-- job and the number of steps in a timed group
local works = {
  gpt = function()
    return { model = nn.GPT { vocab = 256, layers = 6, heads = 6, width = 384, context = 256 }, loss = nn.CrossEntropy(),
      data = data.synthetic { tokens = 256, context = 256, samples = 2000 }, batch = 8, clip = 1.0,
      optimizer = optim.AdamW { lr = 3e-4, betas = { 0.9, 0.95 }, weight_decay = 0.1 } }, 1
  end,
  mlp4 = function()
    local layers = {}
    for i = 1, 4 do
      layers[#layers + 1] = nn.Linear(1024, 1024)
      if i < 4 then layers[#layers + 1] = nn.ReLU() end
    end
    return { model = nn.Sequential(layers), loss = nn.MSE(), batch = 64 * args.ranks,
      data = data.synthetic { inputs = { 1024 }, targets = { 1024 }, samples = 128 },
      optimizer = optim.AdamW { lr = 3e-4, betas = { 0.9, 0.95 }, weight_decay = 0.1 } }, 5
  end,
  linear = function()
    return { model = nn.Linear(10, 5), loss = nn.MSE(), batch = 32 * args.ranks,
      data = data.synthetic { inputs = { 10 }, targets = { 5 }, samples = 6400 }, optimizer = optim.SGD { lr = 0.01 } }, 2000
  end,
  mlp128 = function()
    return cross_entropy(nn.Sequential { nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10) }, { 784 },
      optim.Adam { lr = 3e-4 }), 300
  end,
  cnn = function()
    return cross_entropy(nn.Sequential { nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
      nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10) }, { 1, 28, 28 }, optim.Adam { lr = 3e-4 }), 3
  end,
}

local spec, group = works[args.work]()
local warm = math.max(2, group // 4)
spec.steps, spec.precision = warm + group * args.count, args.precision
if args.micro > 0 then spec.batch = { global = spec.batch, micro = args.micro } end
local engine = dt.engine(dt.job(spec))

for _ = 1, warm do engine:step() end
engine.exec:pipe_times()
local times = {}
for g = 1, args.count do
  local begin = core.now()
  for _ = 1, group do engine:step() end
  times[g] = (core.now() - begin) / group
end
table.sort(times)

local function peak_mb()
  for line in io.lines "/proc/self/status" do
    local kb = line:match "^VmHWM:%s*(%d+)"
    if kb then return tonumber(kb) / 1000 * 1.024 end
  end
end
-- A pipeline: what the schedule's bubble and the slowest stage's times allow, and the part of a step outside of it.
local f, b, w = engine.exec:pipe_times()
local ideal = 0
if f then
  local n = group * args.count * engine.loader:micros()[1]
  local all = dt.all_gather(dt.tensor({ f / n, b / n, w / n }, "f64")):totable()
  local slow, most = { 0, 0, 0 }, 0
  for _, t in ipairs(all) do
    most = math.max(most, t[1] + t[2] + t[3])
    for k = 1, 3 do slow[k] = math.max(slow[k], t[k]) end
  end
  local scale = most / (slow[1] + slow[2] + slow[3]) -- stages whose parts differ: the busiest one's sum
  local schedule = require "dtrain.strategy.pipeline".schedule(engine.job.parallel.p, engine.loader:micros()[1])
  ideal = schedule:time(slow[1] * scale, slow[2] * scale, slow[3] * scale)
end
if dt.rank() == 0 then
  if f then print(("RESULT_PIPE ideal_us=%.1f"):format(ideal * 1e6)) end
  print(("RESULT step_us=%.2f peak_mb=%.1f plan_mb=%.1f"):format(times[#times // 2 + 1] * 1e6, peak_mb(),
    engine.plan:memory().total / 1e6))
end
