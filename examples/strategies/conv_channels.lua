-- Channels of a convolution net divided: one convolution by its output channels, the next by its input channels, so that what lies
-- between them (batch norm too) is divided, and one sum of partial results serves both. What comes behind the pair is whole.
--   dtrain explain examples/strategies/conv_channels.lua --ranks 4     look at: one all_reduce over channels a pair and direction
local dt = require "dtrain"
local nn = dt.nn
local channels = { name = "channels", axes = function() return { { name = "channels", size = "auto" } } end }
function channels.place(g)
  local nodes, first = g:nodes(), true
  for _, n in ipairs(nodes) do
    if n.op == "conv2d" then
      g:place(nodes[n.inputs[2]].name, { channels = first and "S(0)" or "S(1)" })
      if first then g:place(nodes[n.inputs[3]].name, { channels = "S(0)" }) end
      first = not first
    elseif n.op == "batch_norm" and not first then
      for k = 2, 3 do g:place(nodes[n.inputs[k]].name, { channels = "S(0)" }) end
    end
  end
end
local function pair(from, to)
  return nn.Sequential { nn.Conv2d(from, to, 3, { padding = 1 }), nn.BatchNorm2d(to), nn.GELU(),
    nn.Conv2d(to, to, 3, { padding = 1 }), nn.BatchNorm2d(to), nn.GELU(), nn.AvgPool2d(2) }
end

return dt.job { model = nn.Sequential { pair(3, 16), pair(16, 32), nn.Flatten(), nn.Linear(32 * 4 * 4, 10) }, loss = nn.CrossEntropy(),
  data = dt.data.synthetic { inputs = { 3, 16, 16 }, classes = 10, samples = 256 }, batch = 16,
  optimizer = dt.optim.SGD { lr = 0.05 }, steps = 20, parallel = { strategies = { channels } } }
