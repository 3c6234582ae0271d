-- What ranks exchange in a step, from plans: entries, totals, and both as text. Called by explain and plan.
local util = require "dtrain.util"

local T = {}

--- What a rank sends each time, by kind of collective: n ranks, bytes of the whole. As of ring algorithms.
T.formula = {
  all_reduce = "2 (n - 1) / n of the bytes", reduce_scatter = "(n - 1) / n of the bytes",
  all_gather = "(n - 1) / n of the whole", all_to_all = "(n - 1) / n of the bytes", broadcast = "the bytes", shift = "the bytes",
  send = "the bytes", recv = "receives the bytes",
}

local function axis_of(c)
  local text = table.concat(c.axes, " x ")
  if c.part then text = text .. (c.part > 0 and " in blocks of %d" or " across blocks of %d"):format(math.abs(c.part)) end
  return text
end

-- "linear to layer_norm"
local function run(first, last)
  local function name(op) return op == "fused" and "elementwise" or op end
  return first == last and name(first) or name(first) .. " to " .. name(last)
end

local function entry(job, plan, c, micro, every)
  local e = { op = c.op, axis = axis_of(c), axes = util.array(c.axes), ranks = c.ranks, peer = c.peer,
    stages = c.stages and util.array(c.stages), reduction = c.reduction, dtype = c.dtype, bytes = c.bytes, sent = c.sent,
    received = c.received, when = c.when, reason = c.reason, line = c.line or job.where }
  e.times = c.each_microbatch and micro or 1
  if every then e.when, e.times, e.every = ("every %d steps"):format(every), 1 / every, every end
  local share = c.each_microbatch or c.when == "after the last microbatch"
  share = share and plan:flops() > 0 and math.min(1, c.flops / plan:flops()) or nil
  e.overlapped = c.overlapped and (c.first ~= nil or c.peer ~= nil)
  if c.peer then
    e.beside = "overlapped with what the schedule has other microbatches do"
  elseif e.overlapped then
    e.first, e.last, e.share = c.first, c.last, share
    e.beside = ("overlapped with %s%s"):format(run(c.first, c.last),
      share and (", %.2g %% of a microbatch's operations"):format(100 * share) or "")
  elseif c.first and c.needs then
    e.beside = ("nothing left to overlap: only %s before %s needs it"):format(run(c.first, c.last), run(c.needs, c.needs))
  elseif c.needs then
    e.beside = ("nothing left to overlap: %s needs it at once"):format(run(c.needs, c.needs))
  else
    e.beside = "nothing left to overlap: this part of the step ends"
  end
  return e
end

--- The entries of a rank's plans (engine.plans) in the order of the step; micro: microbatches of a full step. An entry: op, axis,
--- axes, ranks | peer, reduction, dtype, bytes (of its input), sent and received (each time), when, times (in a step), overlapped,
--- first, last and share (of the operations beside it), beside (these in words), reason, line.
function T.list(job, plans, micro)
  local out = util.array {}
  for _, c in ipairs(plans.main:collectives()) do out[#out + 1] = entry(job, plans.main, c, micro) end
  for _, b in ipairs(plans.between) do
    for _, c in ipairs(b.plan:collectives()) do out[#out + 1] = entry(job, b.plan, c, micro, b.every) end
  end
  return out
end

--- Sums by axis, kind and size of the group: { axis, op, ranks, times, sent, received, formula }, bytes and times in a step.
function T.totals(list)
  local out, known = util.array {}, {}
  for _, e in ipairs(list) do
    local key = ("%s;%s;%s"):format(e.axis, e.op, e.ranks)
    local t = known[key]
    if not t then
      t = { axis = e.axis, op = e.op, ranks = e.ranks, times = 0, sent = 0, received = 0, formula = T.formula[e.op] }
      known[key], out[#out + 1] = t, t
    end
    t.times, t.sent, t.received = t.times + e.times, t.sent + e.times * e.sent, t.received + e.times * e.received
  end
  table.sort(out, function(a, b)
    if a.axis ~= b.axis then return a.axis < b.axis end
    if a.op ~= b.op then return a.op < b.op end
    return (a.ranks or 0) < (b.ranks or 0)
  end)
  return out
end

--- One line of an entry.
function T.line(e)
  local stages = e.stages and " of stages " .. table.concat(e.stages, ", ") or ""
  local to = e.peer and (e.op == "send" and " to %d" or " from %d"):format(e.peer) or ""
  return ("%s %s%s%s %s%s %d bytes, %s, %s%s%s"):format(e.op, e.axis, stages, to, e.dtype, e.reduction and " " .. e.reduction or "",
    e.bytes, e.when, e.beside, e.reason and "; " .. e.reason or "", e.line and " (" .. e.line .. ")" or "")
end

local function number(x) return math.type(x) == "integer" and util.commas(x) or ("%.1f"):format(x) end

--- The table of totals, as lines.
function T.table(totals)
  local rows = { { "axis", "collective", "times", "bytes sent", "received", "sent each time" } }
  for _, t in ipairs(totals) do
    rows[#rows + 1] = { t.axis, t.op, number(t.times), number(t.sent), number(t.received), t.formula .. (t.ranks and
      (", n = %d"):format(t.ranks) or "") }
  end
  local width = {}
  for _, row in ipairs(rows) do
    for c, text in ipairs(row) do width[c] = math.max(width[c] or 0, #text) end
  end
  return util.map(rows, function(row)
    return (table.concat(util.map(row, function(text, c)
      local gap = (" "):rep(width[c] - #text)
      return (c >= 3 and c <= 5) and gap .. text or text .. gap
    end), "  "):gsub(" +$", ""))
  end)
end

return T
