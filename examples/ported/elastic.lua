-- A data-parallel job for an elastic launcher: it takes the ranks that the environment gives, saves after each epoch, and goes
-- on from its last checkpoint when it is started again.
--   mpirun -n 4 dtrain examples/ported/elastic.lua --backend mpi --checkpoint runs/elastic --resume auto
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

local args = dt.args { lr = 0.01, epochs = 10, batch_size = 32, checkpoint = "",
  backend = { default = "auto", choices = { "auto", "mpi", "self" }, help = "who joins the ranks; self: each process alone" },
  data = { default = "", help = "a safetensors file with x, y, weight, bias and order_<ranks>" } }
dt.init { backend = args.backend }

local t = args.data ~= "" and dt.load(args.data) or { x = dt.randn({ 1000, 10 }, 1), y = dt.rand({ 1000, 5 }, 2):ge(0.5):to "f32" }
local order = t["order_" .. dt.size()] -- of each epoch and rank
local model = nn.Linear(10, 5)
if t.weight then model:load { weight = t.weight, bias = t.bias } end

local engine = dt.engine(dt.job {
  model = model,
  loss = nn.MSE(),
  data = data.tensors { inputs = t.x, targets = t.y, order = order and order:transpose(1, 2):reshape { order:shape()[1], -1 } },
  batch = args.batch_size * dt.size(),
  optimizer = optim.SGD { lr = args.lr },
  epochs = args.epochs,
  checkpoint = args.checkpoint ~= "" and { dir = args.checkpoint, keep = 2 } or nil,
})
for _, batch in engine:batches() do
  local m = engine:step(batch)
  if batch.index % 10 == 0 and dt.rank() == 0 then print(("[%d, %d] loss: %.7f"):format(batch.epoch, batch.index, m.loss)) end
  if args.checkpoint ~= "" and batch.index + 1 == engine.steps_per_epoch then engine:save() end
end
