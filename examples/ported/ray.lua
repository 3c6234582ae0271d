-- Ray's pool of workers: each has its own model and optimizer, every batch goes to all of them, losses are averaged.
--   mpirun -n 2 dtrain examples/ported/ray.lua
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

local args = dt.args { lr = 0.01, epochs = 10, batch_size = 32,
  data = { default = "", help = "a safetensors file with x, y, weight and bias" } }

local t = args.data ~= "" and dt.load(args.data) or { x = dt.randn({ 1000, 10 }, 1), y = dt.rand({ 1000, 5 }, 2):ge(0.5):to "f32" }
local model = nn.Linear(10, 5)
if t.weight then model:load { weight = t.weight, bias = t.bias } end

local engine = dt.engine(dt.job {
  model = model,
  loss = nn.MSE(),
  data = data.tensors { inputs = t.x, targets = t.y, order = dt.arange(1000) }, -- unshuffled
  batch = args.batch_size,
  optimizer = optim.SGD { lr = args.lr },
  epochs = args.epochs,
  parallel = { independent = true },
})
for _, batch in engine:batches() do
  local m = engine:step(batch) -- m.loss: the mean over the workers
  if batch.index % 10 == 0 and dt.rank() == 0 then
    print(("epoch %d batch %d loss %.7f"):format(batch.epoch, batch.index, m.loss))
  end
end
