-- Horovod's tutorial: the learning rate grows with the ranks, gradients are averaged, rank 0 prints.
--   mpirun -n 2 dtrain examples/ported/horovod.lua
--   mpirun -n 2 dtrain examples/ported/horovod.lua --data tests/data/programs.safetensors    PyTorch's data, order and weights
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

local args = dt.args { lr = 0.01, epochs = 10, batch_size = 32,
  data = { default = "", help = "a safetensors file with x, y, weight, bias and order_<ranks>" } }

local t = args.data ~= "" and dt.load(args.data) or { x = dt.randn({ 1000, 10 }, 1), y = dt.rand({ 1000, 5 }, 2):ge(0.5):to "f32" }
local order = t["order_" .. dt.size()] -- of each epoch and rank
local model = nn.Linear(10, 5)
if t.weight then model:load { weight = t.weight, bias = t.bias } end -- every rank begins with rank 0's values in any case

local engine = dt.engine(dt.job {
  model = model,
  loss = nn.MSE(),
  data = data.tensors { inputs = t.x, targets = t.y, order = order and order:transpose(1, 2):reshape { order:shape()[1], -1 } },
  batch = args.batch_size * dt.size(),
  optimizer = optim.SGD { lr = args.lr * dt.size() },
  epochs = args.epochs,
})
for _, batch in engine:batches() do
  local m = engine:step(batch)
  if batch.index % 10 == 0 and dt.rank() == 0 then
    print(("Train Epoch: %d [%d/%d]\tLoss: %.7f"):format(batch.epoch, batch.index, engine.steps_per_epoch, m.loss))
  end
end
