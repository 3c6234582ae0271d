-- A net with three batch norms in a loop of its own: prints what the first has gathered after a step in which all samples were seen,
-- and how many collectives of later steps were of no plan. For tests.
local core, dt = require "dtrain.core", require "dtrain"
local nn = dt.nn

local args = dt.args { parallel = "{}", precision = "f32", micro = 0, compare = 0 }

local function block() return nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, { padding = 1 }), nn.ReLU() end

local layers = {}
for _ = 1, 3 do for _, m in ipairs { block() } do layers[#layers + 1] = m end end
layers[#layers + 1] = nn.Flatten()
layers[#layers + 1] = nn.Linear(4 * 36, 3)
local x = dt.arange(24 * 4 * 36):to("f32"):reshape { 24, 4, 6, 6 }
x = dt.sin(x * 0.37) + x * 1e-3
local labels = {}
for i = 1, 24 do labels[i] = i % 3 end
local job = dt.job {
  model = nn.Sequential(layers), loss = nn.CrossEntropy(), steps = 6, precision = args.precision,
  data = dt.data.tensors { inputs = x, targets = dt.tensor(labels, "i64") },
  batch = { global = 24, micro = args.micro > 0 and args.micro or nil },
  optimizer = dt.optim.SGD { lr = 0.05 }, parallel = load("return " .. args.parallel)(), compare_every = args.compare,
}
local e = dt.engine(job)
local before
for step = 1, 5 do
  e:step()
  if step == 1 then
    local mean = e:whole "buffer:0.running_mean"
    if dt.rank() == 0 then
      local want = x:mean { 0, 2, 3 } * 0.1
      print(("running mean off by %.1e"):format((mean - want):abs():max():item()))
    end
    before = core.unplanned()
  end
end
if dt.rank() == 0 then print(("%d collectives of no plan"):format(core.unplanned() - before)) end
