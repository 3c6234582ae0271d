-- A pipeline's step as text: a row for each rank of the axis of stages, a column for each tick.
local util = require "dtrain.util"

local M = {}

--- The share of a step of so many microbatches that a rank idles, when a backward takes twice as long as a forward and its halves are
--- alike; the checked schedule. order: job.parallel:schedule().
function M.bubble(order, ranks, micro)
  local s = order:steps(ranks, micro)
  local _, share = s:time(1, 1, 1)
  return share, s
end

-- What stands in front of each row.
local function labels(s)
  local plain, names = true, {}
  for r, list in ipairs(s:stages()) do
    plain = plain and #list == 1 and list[1] == r - 1
    names[r] = ("rank %d (stage%s %s)"):format(r - 1, #list > 1 and "s" or "", table.concat(list, ", "))
  end
  return plain and util.map(names, function(_, r) return ("stage %d"):format(r - 1) end) or names
end

-- A row: actions that run together are one, joined by "+".
local function row(actions, last, width, letters)
  local out, t, i = {}, 0, 1
  while i <= #actions do
    local start, text, n = actions[i][4] // 1, {}, 0
    repeat
      local a = actions[i]
      text[#text + 1] = ("%s%d%s"):format(a[1], a[2], letters and string.char(96 + a[3]) or "")
      n, i = n + 1, i + 1
    until not (actions[i] and actions[i].with)
    for _ = t, start - 1 do out[#out + 1] = "." .. (" "):rep(width - 1) end
    text = table.concat(text, "+")
    out[#out + 1] = text .. (" "):rep(n * width + n - 1 - #text)
    t = start + n
  end
  for _ = t, last - 1 do out[#out + 1] = "." .. (" "):rep(width - 1) end
  return table.concat(out, " ")
end

--- Lines of the chart; F, B and W are one tick each.
function M.lines(order, ranks, micro)
  local share, s = M.bubble(order, ranks, micro)
  local w, most = s:split() and 1 or 0, 1
  for _, list in ipairs(s:stages()) do most = math.max(most, #list) end
  local last = s:time(1, 1, w)
  local width = #tostring(micro) + 1 + (most > 1 and 1 or 0)
  local out = { ("pipeline of %d stages%s, schedule %s, %d microbatches: %d ticks, bubble %.1f %%, "
    .. "%s stages' activations held at most"):format(ranks, most > 1 and (" in %d chunks each"):format(most) or "",
    order.name, micro, last, 100 * share, table.concat(s:in_flight(), " ")) }
  local names = labels(s)
  for rank, actions in ipairs(s:starts(1, 1, w)) do
    out[#out + 1] = (names[rank] .. "  " .. row(actions, last, width, most > 1)):gsub(" +$", "")
  end
  return out
end

--- What batch.micro would do about a bubble of more than a quarter of the step: a line, or nil where the bubble is smaller.
--- rows: samples of a microbatch; count(rows) -> microbatches of a step when they have so many.
function M.hint(order, ranks, rows, count)
  local share = M.bubble(order, ranks, count(rows))
  if share <= 0.25 then return end
  local best, at
  for r = rows - 1, 1, -1 do
    local ok, other = pcall(M.bubble, order, ranks, count(r)) -- some schedules refuse some numbers of microbatches
    if ok and rows % r == 0 and other < (best or share) then best, at = other, r end
    if best and best <= 0.25 then break end
  end
  if at then
    return ("batch.micro = %d makes %d microbatches of it, and the bubble %.1f %%"):format(at, count(at), 100 * best)
  end
  return "batch.micro cannot make it smaller; more microbatches need a larger batch.global"
end

--- The chart as values: { stages, chunks, schedule, microbatches, ticks, bubble, in_flight, map = for each rank its stages,
--- actions = for each rank a list of { kind, microbatch, chunk, start, with = whether it runs together with the one before it } }.
function M.data(order, ranks, micro)
  local share, s = M.bubble(order, ranks, micro)
  local w = s:split() and 1 or 0
  return { stages = ranks, chunks = order.chunks, schedule = order.name, microbatches = micro,
    ticks = (s:time(1, 1, w)), bubble = share, map = s:stages(),
    in_flight = s:in_flight(), actions = util.map(s:starts(1, 1, w), function(actions)
      return util.array(util.map(actions, function(a)
        return { kind = a[1], microbatch = a[2], chunk = a[3], start = a[4], with = a.with or nil }
      end))
    end) }
end

return M
