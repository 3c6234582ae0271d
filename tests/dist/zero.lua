-- A job for tests of strategies on the gradient side: a small language model, tied or not, with all that an update can have.
--   dtrain tests/dist/zero.lua --zero 2 --optimizer adamw --clip 0.5 --precision bf16 --every micro --dir runs/x
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

local args = dt.args { zero = 0, resident = 0, bucket = 0.01, every = "step", order = "ready", dtype = "", optimizer = "adamw",
  clip = 0.0, clip_value = 0.0, precision = "f32", global = 10, micro = 2, samples = 33, dir = "", steps_of_job = 5, evals = false,
  report = "", hook = "" }

local n, context = args.samples, 16
local ids = {}
for i = 1, n * (context + 1) do ids[i] = (i * i + 7 * i) % 61 end
local all = dt.tensor(ids, "i64"):reshape { n, context + 1 }
local inputs = all:slice { dim = 1, start = 0, stop = context }
local targets = all:slice { dim = 1, start = 1, stop = context + 1 }

local optimizers = {
  adamw = function()
    return optim.AdamW { lr = 1e-2, eps = 1e-3, weight_decay = 0.1,
      groups = { { match = { "bias$" }, weight_decay = 0.0, lr = 2e-2 } } }
  end,
  sgd = function() return optim.SGD { lr = 0.05, momentum = 0.9 } end,
  lamb = function() return optim.LAMB { lr = 1e-2, eps = 1e-3, weight_decay = 0.1 } end,
  factored = function() -- looks at rows: needs whole parameters
    return optim.define { name = "factored", update = function(p, g, _, h)
      return p - g * dt.rsqrt(dt.mean(dt.square(g), { dims = { -1 }, keepdim = true }) + 1) * h.lr
    end } { lr = 0.1 }
  end,
}

local hooks = { bf16 = dt.hooks.bf16, hierarchical = dt.hooks.hierarchical { inner = 2 }, powersgd = dt.hooks.powersgd { rank = 2 },
  topk = dt.hooks.topk { fraction = 0.1 }, one_bit = dt.hooks.one_bit, adasum = dt.hooks.adasum,
  mean = function(bucket) return bucket:all_reduce("data", "mean") end,
  greatest = function(bucket) return bucket:all_reduce("data", "max") end,
  shape = function(bucket) return bucket:slice { dim = 0, start = 0, stop = 8 } end,
  number = function() return 3 end }

local set = data.tensors { inputs = inputs, targets = targets }
local zero = args.zero
return dt.job {
  model = nn.GPT { vocab = 61, layers = 2, heads = 2, width = 16, context = context },
  loss = nn.CrossEntropy(),
  data = { train = set, valid = args.evals and set or nil },
  batch = { global = args.global, micro = args.micro },
  optimizer = optimizers[args.optimizer](),
  precision = args.precision,
  clip = { norm = args.clip > 0 and args.clip or nil, value = args.clip_value > 0 and args.clip_value or nil },
  steps = args.steps_of_job,
  checkpoint = args.dir ~= "" and { dir = args.dir } or nil,
  parallel = { zero = zero, resident = zero == 3 and args.resident or nil,
    gradient = { hook = hooks[args.hook],
      bucket_mb = args.bucket, first_bucket_mb = args.bucket, every = args.every, order = args.order,
      dtype = args.dtype ~= "" and args.dtype or nil } },
  after = function(engine)
    if args.report == "" then return end
    local out = { losses = dt.tensor(engine.history, "f64") }
    for _, name in ipairs(engine.exec:names()) do out[name] = engine.exec:get(name) end
    if args.evals then
      local last = engine.evaluations[#engine.evaluations][2]
      for k, v in dt.sorted(last) do out["eval " .. k] = dt.tensor({ v }, "f64") end
    end
    if dt.rank() == 0 then dt.save(args.report, out) end
  end,
}
