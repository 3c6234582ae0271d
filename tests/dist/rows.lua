-- Samples divided over an axis that cuts tensors, by placing the inputs: a job for `dtrain check`; with --loop its ranks print which
-- samples they were asked for. For tests.
local dt = require "dtrain"
local nn = dt.nn

local args = dt.args { rows = 2, loop = false, targets = true, width = 8 }

local rows = { name = "rows" }
function rows.axes() return { { name = "row", size = args.rows } } end
function rows.place(g)
  g:place("inputs", { row = "S(0)" })
  if args.targets then g:place("targets", { row = "S(0)" }) end
end

local asked = {}
local job = dt.job {
  model = nn.Sequential { nn.Linear(args.width, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 16) }, loss = nn.MSE(),
  data = dt.data.from(function(i)
    asked[#asked + 1] = i
    return dt.full({ args.width }, i / 10), dt.full({ 16 }, math.sin(i))
  end, 24), batch = { global = 24, micro = 12 }, optimizer = dt.optim.AdamW { lr = 1e-2 }, steps = 3,
  parallel = { strategies = { rows } },
}
if not args.loop then return job end
local e = dt.engine(job)
asked = {}
e:step()
print(("rank %d: %s."):format(dt.rank(), table.concat(asked, " ")))
