-- A pipeline's step as text: a row for each stage, a column for each tick.
local pipeline = require "dtrain.strategy.pipeline"
local util = require "dtrain.util"

local M = {}

--- The bubble of a step of so many microbatches: share of a step's time that a stage idles, when a backward takes twice as
--- long as a forward and its halves are alike; the schedule, its name.
function M.bubble(p, micro)
  local s, name = pipeline.schedule(p, micro)
  local _, share = s:time(1, 1, 1)
  return share, s, name
end

--- Lines of the chart; F, B and W are one tick each; actions that belong together are one cell, with a + between them.
function M.lines(p, micro)
  local share, s, name = M.bubble(p, micro)
  local w = s:split() and 1 or 0
  local last = s:time(1, 1, w)
  local width = #tostring(micro) + 1 + (p.chunks > 1 and 1 or 0)
  local out = { ("pipeline of %d stages%s, schedule %s, %d microbatches: %d ticks, bubble %.1f %%, "
    .. "%s stages' activations held at most"):format(p.pipeline, p.chunks > 1 and (" in %d chunks each"):format(p.chunks) or "",
    name, micro, last, 100 * share, table.concat(s:in_flight(), " ")) }
  for rank, actions in ipairs(s:starts(1, 1, w)) do
    local cells, joined = {}, {}
    for t = 1, last do cells[t] = "." end
    for _, a in ipairs(actions) do
      joined[a[4] // 1 + 1] = a.with
      cells[a[4] // 1 + 1] = ("%s%d%s"):format(a[1], a[2], p.chunks > 1 and string.char(96 + a[3]) or "")
    end
    local line = {}
    for t = 1, #cells do
      line[#line + 1] = cells[t] .. (joined[t] and "+" or (" "):rep(width + 1 - #cells[t]))
    end
    out[#out + 1] = (("stage %d  "):format(rank - 1) .. table.concat(line)):gsub(" +$", "")
  end
  return out
end

--- What batch.micro would do about a bubble of more than a quarter of the step: a line, or nil where the bubble is smaller.
--- rows: samples of a microbatch; count(rows) -> microbatches of a step when they have so many.
function M.hint(p, rows, count)
  local share = M.bubble(p, count(rows))
  if share <= 0.25 then return end
  local best, at
  for r = rows - 1, 1, -1 do
    local ok, other = pcall(M.bubble, p, count(r)) -- some schedules refuse some numbers of microbatches
    if ok and rows % r == 0 and other < (best or share) then best, at = other, r end
    if best and best <= 0.25 then break end
  end
  if at then
    return ("batch.micro = %d makes %d microbatches of it, and the bubble %.1f %%"):format(at, count(at), 100 * best)
  end
  return "batch.micro cannot make it smaller; more microbatches need a larger batch.global"
end

--- The chart as values: { stages, chunks, schedule, microbatches, ticks, bubble, in_flight, actions = for each rank of the axis
--- a list of { kind, microbatch, chunk, start, with = true where the next belongs to it } }.
function M.data(p, micro)
  local share, s, name = M.bubble(p, micro)
  local w = s:split() and 1 or 0
  return { stages = p.pipeline, chunks = p.chunks, schedule = name, microbatches = micro,
    ticks = (s:time(1, 1, w)), bubble = share,
    in_flight = s:in_flight(), actions = util.map(s:starts(1, 1, w), function(actions)
      return util.array(util.map(actions, function(a)
        return { kind = a[1], microbatch = a[2], chunk = a[3], start = a[4], with = a.with }
      end))
    end) }
end

return M
