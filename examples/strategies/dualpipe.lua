-- DualPipe (DeepSeek-V3, 2024): microbatches enter the pipeline from both ends. Every stage lies on two ranks, r and ranks - 1 - r,
-- whose gradients are added up; half of the microbatches go each way, and in between a rank runs a forward of one way together with
-- a backward of the other, so that what the one sends travels while the other computes.
--   mpirun --oversubscribe -n 4 dtrain examples/strategies/dualpipe.lua
--   dtrain explain examples/strategies/dualpipe.lua --ranks 4   look at: the chart, F+B+W as one action
local dt = require "dtrain"
local nn, optim, data = dt.nn, dt.optim, dt.data

local dualpipe = {}
function dualpipe.place(stage, ranks) return { stage, ranks - 1 - stage } end

-- The steps of the paper's public code; "F0" is a forward of the way that begins on this rank's half, "B1" a backward of the other.
function dualpipe.order(rank, ranks, micro)
  if ranks % 2 ~= 0 then error("dualpipe needs an even number of ranks", 0) end
  local half, near, out, done, waiting = ranks // 2, math.min(rank, ranks - 1 - rank), {}, {}, {}
  local far = half - near - 1
  local function put(what) -- the next microbatches' actions, together; a small step leaves some out
    local actions = {}
    for kind, side in what:gmatch "(%u)(%d)" do
      local way = rank < half and tonumber(side) or 1 - tonumber(side)
      local first, last = way * ((micro + 1) // 2), way == 0 and (micro + 1) // 2 or micro
      done[kind .. side] = (done[kind .. side] or 0) + 1
      if first + done[kind .. side] <= last then actions[#actions + 1] = { kind, first + done[kind .. side], way + 1 } end
    end
    local action = table.remove(actions, 1)
    if action and #actions > 0 then action.with = actions end
    out[#out + 1] = action
  end
  local function split(side) -- a backward whose weight gradients wait
    put("B" .. side)
    waiting[#waiting + 1] = "W" .. side
  end
  local function weights() put(table.remove(waiting, 1)) end

  for _ = 1, 2 * far do put "F0" end
  for _ = 0, near do put "F0" put "F1" end
  for _ = 1, far do split "1" weights() put "F1" end
  for i = 1, math.max(ranks, (micro + 1) // 2) - ranks + near + 1 do
    if i == 1 and far == 0 then put "F0" put "B1W1" else put "F0B1W1" end
    put "F1B0W0"
  end
  for _ = 1, far do put "B1W1" put "F1B0W0" end
  for i = 0, near do
    if i > near // 2 or i == (near + 1) // 2 and near % 2 == 1 then split "1" else put "B1W1" end
    if i >= (near + 1) // 2 then split "0" else put "B0W0" end
  end
  for _ = 1, far do weights() split "0" end
  for _ = 0, near do weights() end
  return out
end

return dt.job { model = nn.GPT { vocab = 64, layers = 8, heads = 4, width = 32, context = 16 }, loss = nn.CrossEntropy(),
  data = data.synthetic { tokens = 64, context = 16, samples = 256 }, batch = { global = 32, micro = 2 }, steps = 10,
  optimizer = optim.AdamW { lr = 1e-3 }, parallel = { pipeline = dt.args({ pipeline = 4 }).pipeline, schedule = dualpipe } }
