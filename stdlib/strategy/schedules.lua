-- Pipeline schedules: functions (stage, stages, microbatches, chunks) -> the stage's actions in order, each { "F" | "B" | "W",
-- microbatch [, chunk] }. F is forward, B backward; where a schedule has W, the gradients of weights are W's and B only
-- makes those that the stage before waits for. Microbatches and chunks count from 1, stages from 0.
local util = require "dtrain.util"

local S = {}

--- All forwards, then all backwards (Huang et al. 2019). Every microbatch's activations are held.
function S.gpipe(_, _, micro)
  local order = {}
  for i = 1, micro do order[#order + 1] = { "F", i } end
  for i = 1, micro do order[#order + 1] = { "B", i } end
  return order
end

-- Forwards ahead, then one forward and one backward in turn, then the backwards left; after_b(order, b) adds to it.
local function one_each(warm, total, f, b)
  local order, done = {}, 0
  for k = 1, total + warm do
    if k <= total then order[#order + 1] = f(k) end
    if k > warm then
      done = done + 1
      for _, action in ipairs(b(done)) do order[#order + 1] = action end
    end
  end
  return order
end

--- As few microbatches in flight as keep every stage busy (Narayanan et al. 2019): stages - stage.
S["1f1b"] = function(stage, stages, micro)
  return one_each(math.min(stages - 1 - stage, micro), micro,
    function(k) return { "F", k } end, function(k) return { { "B", k } } end)
end

--- Each rank has several chunks of the model, so that the pipeline fills in smaller steps (Narayanan et al. 2021).
function S.interleaved(stage, stages, micro, chunks)
  if micro % stages ~= 0 then
    local low = micro // stages * stages
    util.fail("schedule interleaved: %d microbatch%s not divide by pipeline = %d; %s%d would (batch.micro sets their size)",
      micro, micro == 1 and " does" or "es do", stages, low > 0 and low .. " or " or "", low + stages)
  end
  local function nth(k, back) -- the k-th (from 0) of microbatches in groups of `stages`, chunk by chunk
    local chunk = k % (stages * chunks) // stages
    return k // (stages * chunks) * stages + k % stages + 1, back and chunks - chunk or chunk + 1
  end
  return one_each(math.min(2 * (stages - stage - 1) + (chunks - 1) * stages, micro * chunks), micro * chunks,
    function(k) return { "F", nth(k - 1) } end, function(k) return { { "B", nth(k - 1, true) } } end)
end

--- 1F1B whose weight gradients fill the bubble, with no more memory (Qi et al. 2023): after the b-th backward (from 0)
--- comes W of b - stage.
function S.zb_h1(stage, stages, micro)
  local order = one_each(math.min(stages - 1 - stage, micro), micro, function(k) return { "F", k } end, function(k)
    local actions = { { "B", k } }
    if k > stage then actions[2] = { "W", k - stage } end
    return actions
  end)
  for k = math.max(micro - stage, 0) + 1, micro do order[#order + 1] = { "W", k } end
  return order
end

return S
