-- luacheck: no max line length
-- Trains small models under every schedule and number of microbatches on this many ranks, and compares losses, parameters, optimizer
-- states and metrics with those that one process wrote.
--   dtrain tests/dist/pipelines.lua --save want                 one process
--   mpirun -n 4 dtrain tests/dist/pipelines.lua --want want --pipeline 4 [--more "precision=bf16,clip=1"]
-- Prints a line for each case: its name and the largest relative difference.
local dt = require "dtrain"
local engines = require "dtrain.engine"
local nn, optim, data = dt.nn, dt.optim, dt.data

local args = dt.args { pipeline = 1, save = "", want = "", models = "tied,untied,skip,shared", schedules = "gpipe,1f1b,interleaved,zb_h1,own",
  micros = "1,3,4,8", precision = "f32", clip = 0.0, steps = 5, zero = 0, recompute = "none" }

local Net = nn.module "Net"
function Net:init()
  self.first = nn.Linear(6, 16)
  local middle = {}
  for i = 1, 8 do middle[i] = nn.Linear(16, 16) end
  self.middle, self.last = middle, nn.Linear(16, 3)
  self.unused = nn.Linear(2, 2)
end
function Net:forward(x) -- h skips over all that follows, and is read by several stages
  local h = dt.tanh(self.first(x))
  local y = h
  for i, layer in ipairs(self.middle) do y = dt.gelu(layer(i % 3 == 0 and y + h or y)) + x:sum({ 1 }, true) end
  local ends = dt.concat({ y:slice { dim = 1, start = 0, stop = 8 }, h:slice { dim = 1, start = 4, stop = 12 } }, 1)
  return self.last(ends)
end

-- one layer used over and over: by several stages, and by several chunks of one rank
local Shared = nn.module "Shared"
function Shared:init()
  self.first, self.again, self.norm, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 3)
end
function Shared:forward(x)
  local h = self.first(x)
  for _ = 1, 5 do h = self.norm(dt.tanh(self.again(h)) + h) end
  return self.last(h)
end

local function text(n)
  local ids, next_ids = {}, {}
  for i = 1, n * 10 do ids[i], next_ids[i] = (i * i * 7 + i) % 30, i % 7 == 0 and -100 or (i * 13 + 5) % 30 end
  return data.tensors { inputs = dt.tensor(ids, "i64"):reshape { n, 10 }, targets = dt.tensor(next_ids, "i64"):reshape { n, 10 } }
end

-- all forwards that no backward is ready for: another order on each stage
local function own(stage, stages, micro)
  local order, done = {}, 0
  for i = 1, micro do
    order[#order + 1] = { "F", i }
    if i > 2 * (stages - 1 - stage) then
      done = done + 1
      order[#order + 1] = { "B", done }
    end
  end
  for i = done + 1, micro do order[#order + 1] = { "B", i } end
  return order
end

-- down the ranks and up again, all forwards first
local v = { chunks = 2, place = function(stage, ranks) return stage < ranks and stage or 2 * ranks - 1 - stage end,
  order = function(_, _, micro)
    local order = {}
    for c = 1, 2 do for i = 1, micro do order[#order + 1] = { "F", i, c } end end
    for c = 2, 1, -1 do for i = micro, 1, -1 do order[#order + 1] = { "B", i, c } end end
    return order
  end }

-- from both ends: odd microbatches go up the ranks, even ones down, whose forwards run together with the backwards of the first
local both = { place = function(stage, ranks) return { stage, ranks - 1 - stage } end,
  order = function(_, _, micro)
    local order = {}
    for i = 1, micro, 2 do order[#order + 1] = { "F", i, 1 } end
    for i = 1, micro, 2 do
      local b = { { "B", i, 1 }, { "W", i, 1 } }
      if i < micro then order[#order + 1] = { "F", i + 1, 2, with = b }
      else table.move(b, 1, 2, #order + 1, order) end
    end
    for i = 2, micro, 2 do table.move({ { "B", i, 2 }, { "W", i, 2 } }, 1, 2, #order + 1, order) end
    return order
  end }
local schedules = { own = own, v = v, both = both }

local function job(model, schedule, micro)
  local gpt = model == "tied" or model == "untied" or model == "few" -- few: stages begin inside blocks
  local set = gpt and text(44) or data.synthetic { inputs = { 6 }, targets = { 3 }, samples = 44 }
  return dt.job {
    model = gpt and nn.GPT { vocab = 30, layers = model == "few" and 5 or 8, heads = 2, width = 8, context = 10, dropout = 0.1, tied = model ~= "untied" } or model == "skip" and Net()
      or Shared(),
    loss = gpt and nn.CrossEntropy() or nn.MSE(), data = { train = set:subset(0, 28), valid = set:subset(28, 44) },
    batch = { global = 8, micro = -(-8 // micro) }, steps = args.steps, precision = args.precision, clip = args.clip > 0 and args.clip or nil,
    optimizer = optim.AdamW { lr = 1e-2 }, eval = { metrics = { "loss" } },
    parallel = { pipeline = args.pipeline, schedule = schedules[schedule] or schedule, zero = args.zero, recompute = args.recompute } }
end

local function train(model, schedule, micro)
  local engine = engines.new(job(model, schedule, micro))
  local out, losses, norms = {}, {}, {}
  for step = 1, args.steps do
    local m = engine:step()
    losses[step], norms[step] = m.loss, m.grad_norm
  end
  for _, name in ipairs(engine.exec:names()) do out[name] = engine.exec:get(name) end
  out["the losses"], out["the norms"] = dt.tensor(losses, "f64"), dt.tensor(norms, "f64")
  out["the metric"] = dt.tensor({ engine:eval().loss }, "f64")
  engine.exec:close()
  return out
end

local function distance(name, a, b)
  a, b = a:to "f64", b:to "f64"
  if name:find "qkv%.bias" then -- a key's bias has no gradient but rounding, of which Adam makes whole steps
    local n = a:size(0) // 3
    a, b = a:slice { dim = 0, start = 2 * n, stop = 3 * n }, b:slice { dim = 0, start = 2 * n, stop = 3 * n }
  end
  local d = a - b
  return math.sqrt((d * d):sum():item()) / math.max(math.sqrt((b * b):sum():item()), 1e-30)
end

for model in args.models:gmatch "[^,]+" do
  if args.save ~= "" then
    dt.save(("%s.%s.safetensors"):format(args.save, model), train(model, "gpipe", 1))
  else
    local want = dt.load(("%s.%s.safetensors"):format(args.want, model))
    for schedule in args.schedules:gmatch "[^,]+" do
      for micro in args.micros:gmatch "[^,]+" do
        micro = math.tointeger(micro)
        local got, worst, name_of = train(model, schedule, micro), 0, ""
        for name, w in dt.sorted(want) do
          local d = got[name] and distance(name, got[name], w) or math.huge
          if d > worst or d ~= d then worst, name_of = d, name end
        end
        if dt.rank() == 0 then
          print(("%s, %s, %d microbatches: %.3g %s"):format(model, schedule, micro, worst, name_of))
        end
      end
    end
  end
end
