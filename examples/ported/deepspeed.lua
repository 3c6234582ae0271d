-- DeepSpeed's loop: an engine with forward, backward and step for each microbatch, settings from a JSON file.
--   dtrain examples/ported/deepspeed.lua
--   mpirun -n 2 dtrain examples/ported/deepspeed.lua --deepspeed_config my.json
local dt = require "dtrain"
local nn, data = dt.nn, dt.data

local here = arg[0]:match "^.*/" or ""
local args = dt.args { deepspeed_config = here .. "deepspeed.json", epochs = 10,
  data = { default = "", help = "a safetensors file with x, y, weight and bias" } }

local t = args.data ~= "" and dt.load(args.data) or { x = dt.randn({ 1000, 10 }, 1), y = dt.rand({ 1000, 5 }, 2):ge(0.5):to "f32" }
local model = nn.Linear(10, 5)
if t.weight then model:load { weight = t.weight, bias = t.bias } end

local engine = dt.engine(dt.deepspeed {
  config = args.deepspeed_config,
  model = model,
  loss = nn.MSE(),
  data = data.tensors { inputs = t.x, targets = t.y, order = dt.arange(1000) }, -- unshuffled
  epochs = args.epochs,
})
for _, batch in engine:microbatches() do
  local loss = engine(batch) -- of this rank's microbatch
  engine:backward(loss)      -- adds to the gradients
  engine:step()              -- updates at every gradient_accumulation_steps-th call
  if batch.index % 10 == 0 and batch.micro == 1 and dt.rank() == 0 then
    print(("epoch %d batch %d loss %.7f"):format(batch.epoch, batch.index, loss))
  end
end
