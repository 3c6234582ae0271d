-- Small models whose activations can be made again, one of each kind; prints a digest of all that persists after a few steps.
--   dtrain tests/dist/recompute.lua --kind gpt|cnn|mlp|own
--   --how "full" | "every=2" | "budget=100kB" | "ops=gelu+add" | "match=blocks%.0"
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

local args = dt.args { kind = "gpt", how = "none", precision = "f32", dropout = 0.1, micro = 8, digest = false }

local function recompute()
  local key, value = args.how:match "^(%w+)=(.*)$"
  if not key then return args.how end
  if key ~= "ops" then return { [key] = math.tointeger(value) or value } end
  local ops = {}
  for name in value:gmatch "[^+]+" do ops[#ops + 1] = name end
  return { ops = ops }
end

local function stage(c)
  return nn.Residual(nn.Sequential { nn.Conv2d(c, c, 3, { padding = 1 }), nn.BatchNorm2d(c), nn.ReLU(),
    nn.Conv2d(c, c, 3, { padding = 1 }), nn.BatchNorm2d(c), nn.Dropout(args.dropout) })
end

-- Divides by a running size that it writes itself: what read the old number must not be made again from the new one.
local Tracker = nn.module "Tracker"
function Tracker:init(width)
  self.size = nn.buffer({ 1 }, nn.init.ones())
  self.linear = nn.Linear(width, width)
end
function Tracker:forward(x)
  local y = dt.tanh(self.linear(dt.gelu(x)) / self.size)
  nn.assign(self, "size", self.size * 0.5 + y:abs():mean():reshape { 1 })
  return y * self.size
end

local kinds = {
  own = function()
    return nn.Sequential { nn.Linear(20, 32), Tracker(32), Tracker(32), nn.Linear(32, 5) },
      data.synthetic { inputs = { 20 }, classes = 5, samples = 40 }
  end,
  gpt = function()
    return nn.GPT { vocab = 64, layers = 3, heads = 2, width = 32, context = 24, dropout = args.dropout },
      data.synthetic { tokens = 64, context = 24, samples = 40 }
  end,
  cnn = function()
    return nn.Sequential { nn.Conv2d(3, 8, 3), stage(8), nn.ReLU(), nn.MaxPool2d(2), stage(8), nn.Flatten(), nn.Linear(8 * 25, 5) },
      data.synthetic { inputs = { 3, 12, 12 }, classes = 5, samples = 40 }
  end,
  mlp = function()
    return nn.Sequential { nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 64), dt.tanh, nn.Dropout(args.dropout), nn.Linear(64, 48),
      nn.SiLU(), nn.LayerNorm(48), nn.Linear(48, 5) }, data.synthetic { inputs = { 20 }, classes = 5, samples = 40 }
  end,
}
local model, set = kinds[args.kind]()

local job = dt.job {
  model = model, loss = nn.CrossEntropy(), data = set, batch = { global = 8, micro = args.micro },
  optimizer = optim.AdamW { lr = 1e-2 }, clip = 1.0, precision = args.precision, steps = 5,
  parallel = { recompute = recompute() },
}
if not args.digest then return job end

local engine = dt.engine(job)
local losses = {}
for step in engine:batches() do losses[step] = ("%.9g"):format(engine:step().loss) end
local digest = engine.exec:digest() -- of whole tensors: all ranks call it
if dt.rank() == 0 then
  print("digest " .. digest)
  print("losses " .. table.concat(losses, " "))
  print("activations " .. engine.exec:memory().activations)
  print("repeated " .. (engine.plan:recomputed()))
end
