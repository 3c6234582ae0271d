-- Linear regression, for what must converge on many ranks: gradient hooks with error feedback, local steps, DiLoCo.
--   dtrain tests/dist/regress.lua --hook topk --steps_of_job 200      prints "loss <last>"
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

local args = dt.args { hook = "", every = 0, outer = 0.0, momentum = 0.0, independent = false, steps_of_job = 200, lr = 0.1,
  zero = 0, dir = "", report = "", precision = "f32", global = 16, global_of = "" }

local hooks = { powersgd = dt.hooks.powersgd { rank = 1 }, topk = dt.hooks.topk { fraction = 0.1 }, one_bit = dt.hooks.one_bit,
  adasum = dt.hooks.adasum, bf16 = dt.hooks.bf16 }
local n = 64
local x = dt.randn({ n, 12 }, 1)
local w = dt.randn({ 8, 12 }, 2)
local sync = args.every > 0 and { every = args.every, outer = args.outer > 0 and optim.SGD { lr = args.outer,
  momentum = args.momentum, nesterov = args.momentum > 0 } or nil } or nil

return dt.job {
  model = nn.Linear(12, 8), loss = nn.MSE(),
  data = data.tensors { inputs = x, targets = dt.matmul(x, w, { tb = true }) },
  batch = args.global, optimizer = optim.SGD { lr = args.lr }, steps = args.steps_of_job, precision = args.precision,
  checkpoint = args.dir ~= "" and { dir = args.dir } or nil,
  parallel = { zero = args.zero, sync = sync, independent = args.independent, gradient = { hook = hooks[args.hook] } },
  after = function(engine)
    if dt.rank() == 0 then print(("loss %.9g"):format(engine.history[engine.step_number])) end
    if args.report == "" then return end
    local out = {}
    for _, name in ipairs(engine.exec:names()) do out[name] = engine.exec:get(name) end
    if dt.rank() == 0 then dt.save(args.report, out) end
  end,
}
