-- A placement rule of one's own: rows of images divided over an axis. The library gathers them for a convolution, because windows may
-- cross from rank to rank. Here no window does (its stride is its size), and the strategy says so: each rank works on its rows, up to
-- the mean over all of them.
--   dtrain explain examples/strategies/own_rule.lua --ranks 4     look at: all_reduce of means over rows, and no all_gather of images
local dt = require "dtrain"
local nn = dt.nn
local rows = { name = "rows", axes = function() return { { name = "rows", size = "auto" } } end }
function rows.place(g) g:place("inputs", { rows = "S(2)" }) end
function rows.rule(node, axis)
  if axis ~= "rows" or node.op ~= "conv2d" or node.lies[1] ~= "S(2)" then return nil end
  local _, _, high = table.unpack(node.shapes[2])
  if node.attrs.stride[1] == high and node.attrs.padding[1] == 0 then
    return { inputs = { "S(2)", "R", "R" }, outputs = { "S(2)" } }
  end
end
local patches = nn.Sequential { nn.Conv2d(3, 32, 4, { stride = 4 }), nn.GELU(), nn.Conv2d(32, 64, 2, { stride = 2 }), nn.GELU() }
local Net = nn.module "Net"
function Net:init() self.patches, self.head = patches, nn.Linear(64, 10) end
function Net:forward(x) return self.head(self.patches(x):mean { dims = { 2, 3 } }) end

return dt.job { model = Net(), loss = nn.CrossEntropy(), batch = 16,
  data = dt.data.synthetic { inputs = { 3, 64, 32 }, classes = 10, samples = 128 }, optimizer = dt.optim.AdamW { lr = 1e-3 },
  steps = 10, parallel = { strategies = { rows } } }
