-- Products on a grid (SUMMA, van de Geijn and Watts 1997): every weight is cut over two axes, so that each rank has 1/(rows cols) of
-- it, and of all activations. A product gathers its input along the columns and its weight along the rows; gradients are scattered
-- back the same way.
--   dtrain explain examples/strategies/tensor_2d.lua --ranks 4     look at: all_gather, then reduce_scatter, over row and over col
--   dtrain plan examples/strategies/tensor_2d.lua --ranks 8        look at: an eighth of the parameters, but for the biases
local dt = require "dtrain"
local nn = dt.nn
local grid = { name = "grid" }
function grid.axes() return { { name = "row", size = "auto" }, { name = "col", size = 2 } } end
function grid.place(g)
  g:place("inputs", { row = "S(0)", col = "S(1)" })
  g:place("targets", { row = "S(0)" })
  for _, q in ipairs(g:params()) do g:place(q.name, { col = "S(0)", row = #q.shape == 2 and "S(1)" or "R" }) end
  local function product(x, w, b) return dt.linear(x:place { col = "R" }, w:place { row = "R" }, b):place { col = "S(1)" } end
  for _, n in ipairs(g:nodes()) do if n.op == "linear" then g:replace(n, product) end end
end

return dt.job { model = nn.Sequential { nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16) },
  loss = nn.CrossEntropy(), data = dt.data.synthetic { inputs = { 64 }, classes = 16, samples = 512 }, batch = 32,
  optimizer = dt.optim.AdamW { lr = 1e-3 }, steps = 20, parallel = { strategies = { grid } } }
