-- Megatron's command line: how the model is split over the ranks is said when the job is started.
--   mpirun -n 2 dtrain examples/ported/megatron.lua --tensor-model-parallel-size 2
--   mpirun -n 2 dtrain examples/ported/megatron.lua --pipeline-model-parallel-size 2 --micro-batch-size 8
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

local args = dt.args { tensor_model_parallel_size = 1, pipeline_model_parallel_size = 1, micro_batch_size = 32,
  global_batch_size = 32, lr = 0.01, epochs = 10,
  data = { default = "", help = "a safetensors file with x, y, weight and bias" } }

local t = args.data ~= "" and dt.load(args.data) or { x = dt.randn({ 1000, 10 }, 1), y = dt.rand({ 1000, 5 }, 2):ge(0.5):to "f32" }
local Layer = nn.module "Layer" -- a linear layer as two operations, so that two stages can share it
function Layer:init()
  self.weight, self.bias = nn.parameter({ 5, 10 }, nn.init.default(10)), nn.parameter({ 5 }, nn.init.default(10))
end
function Layer:forward(x) return dt.linear(x, self.weight) + self.bias end
local model = Layer()
if t.weight then model:load { weight = t.weight, bias = t.bias } end

local engine = dt.engine(dt.job {
  model = model,
  loss = nn.MSE(),
  data = data.tensors { inputs = t.x, targets = t.y, order = dt.arange(1000) }, -- unshuffled
  batch = { global = args.global_batch_size, micro = args.micro_batch_size },
  optimizer = optim.SGD { lr = args.lr },
  epochs = args.epochs,
  parallel = { tensor = args.tensor_model_parallel_size, pipeline = args.pipeline_model_parallel_size },
})
for step, batch in engine:batches() do
  local m = engine:step(batch)
  if batch.index % 10 == 0 and dt.rank() == 0 then
    print(("epoch %d iteration %d | lm loss: %.7f"):format(batch.epoch, step, m.loss))
  end
end
