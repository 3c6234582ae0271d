-- Pipeline schedules: { order = function(rank, ranks, microbatches, chunks) -> the rank's actions in order, place = where the stages
-- lie (nil: stage s on rank s % ranks), chunks = stages a rank (nil: one) }. An action is { "F" | "B" | "W", microbatch [, chunk] };
-- with = an action, or a list of them, says what runs together with it. F is forward, B backward; where a schedule has W, the
-- gradients of weights are W's and B only makes those that the stage before waits for. Microbatches and chunks count from 1, stages
-- and ranks from 0.
local S = {}

--- All forwards, then all backwards (Huang et al. 2019). Every microbatch's activations are held.
S.gpipe = { order = function(_, _, micro)
  local order = {}
  for i = 1, micro do order[#order + 1] = { "F", i } end
  for i = 1, micro do order[#order + 1] = { "B", i } end
  return order
end }

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

--- As few microbatches in flight as keep every stage busy (Narayanan et al. 2019): ranks - rank.
S["1f1b"] = { order = function(rank, ranks, micro)
  return one_each(math.min(ranks - 1 - rank, micro), micro,
    function(k) return { "F", k } end, function(k) return { { "B", k } } end)
end }

--- Each rank has several chunks of the model, so that the pipeline fills in smaller steps (Narayanan et al. 2021). Microbatches go in
--- groups of at least `ranks`, chunk by chunk; where they do not divide, the first groups have one more.
S.interleaved = { chunks = 2, order = function(rank, ranks, micro, chunks)
  local forward, backward = {}, {}
  local groups, first = math.max(micro // ranks, 1), 1
  for g = 1, groups do
    local size = micro // groups + (g <= micro % groups and 1 or 0)
    for chunk = 1, chunks do
      for i = first, first + size - 1 do
        forward[#forward + 1] = { "F", i, chunk }
        backward[#backward + 1] = { "B", i, chunks + 1 - chunk }
      end
    end
    first = first + size
  end
  local ahead = 2 * (ranks - rank - 1) + (chunks - 1) * -(-micro // groups)
  return one_each(math.min(ahead, #forward), #forward,
    function(k) return forward[k] end, function(k) return { backward[k] } end)
end }

--- 1F1B whose weight gradients fill the bubble, with no more memory (Qi et al. 2023): after the b-th backward (from 0)
--- comes W of b - rank.
S.zb_h1 = { order = function(rank, ranks, micro)
  local order = one_each(math.min(ranks - 1 - rank, micro), micro, function(k) return { "F", k } end, function(k)
    local actions = { { "B", k } }
    if k > rank then actions[2] = { "W", k - rank } end
    return actions
  end)
  for k = math.max(micro - rank, 0) + 1, micro do order[#order + 1] = { "W", k } end
  return order
end }

return S
