-- Pipeline parallelism: the model is cut into stages, one (or several chunks) on each rank of the axis "pipeline"; a schedule
-- says in which order a stage takes its microbatches. The cut and the messages are the stage pass's (runtime/pass/stage.c).
local core = require "dtrain.core"
local cut = require "dtrain.strategy.cut"
local schedules = require "dtrain.strategy.schedules"
local util = require "dtrain.util"

local P = { name = "pipeline", options = { { "pipeline", "count", 1 }, { "schedule", "string|callable|table", "1f1b" },
  { "chunks", "count" }, { "stages", "string|table", "auto" } } }

--- parallel = { pipeline = ranks, schedule = "gpipe" | "1f1b" | "interleaved" | "zb_h1" | function(rank, ranks,
--- microbatches, chunks) -> actions | { order = such a function, place = function(stage, ranks, chunks) -> rank },
--- chunks = stages a rank, stages = "auto" | { blocks of each stage } | { names at which stages 1, 2, ... begin, as Lua patterns } }
function P.check(p)
  if type(p.schedule) == "string" and not schedules[p.schedule] then
    util.fail("dt.job: parallel: there is no schedule %q; %s", p.schedule, util.suggest(p.schedule, util.keys(schedules)))
  end
  if type(p.schedule) == "table" and not util.callable(p.schedule) then
    p.schedule = util.options("dt.job: parallel: schedule", p.schedule,
      { { "order", "callable", required = true }, { "place", "callable" } })
  end
  p.chunks = p.chunks or (p.schedule == "interleaved" and 2 or 1)
  if p.chunks > 1 and type(p.schedule) == "string" and p.schedule ~= "interleaved" then
    util.fail("dt.job: parallel: chunks = %d, but the schedule %s has one chunk on each rank; take schedule = \"interleaved\"",
      p.chunks, p.schedule)
  end
  if p.chunks > 1 and p.pipeline == 1 and p.schedule ~= "interleaved" then
    util.fail("dt.job: parallel: chunks = %d, but pipeline = 1; chunks belong to stages: set pipeline = 2 or more, or "
      .. "leave chunks out", p.chunks)
  end
  p.stages = cut.check(p.stages, p.pipeline * p.chunks)
end

function P.axes(p) return { { name = "pipeline", size = p.pipeline, splits = "stages" } } end

-- The ranks of stages 0, 1, ... as the script places them; nil: they take turns.
local function placed(p)
  if type(p.schedule) ~= "table" or not p.schedule.place then return end
  local place = {}
  for stage = 0, p.pipeline * p.chunks - 1 do
    local rank = p.schedule.place(stage, p.pipeline, p.chunks)
    if math.type(rank) ~= "integer" then
      util.fail("schedule: place(%d, %d, %d) returned %s; it must return the stage's rank, 0 to %d", stage, p.pipeline, p.chunks,
        util.show(rank), p.pipeline - 1)
    end
    place[stage + 1] = rank
  end
  return place
end

--- The checked schedule of a step of so many microbatches, and its name.
function P.schedule(p, micro)
  local f, name, where = p.schedule, p.schedule, util.where()
  if type(f) == "string" then
    f = schedules[f]
  else
    if not util.callable(f) then f = f.order end
    local info = type(f) == "function" and debug.getinfo(f, "S")
    name, where = "of the script", info and info.short_src .. ":" .. info.linedefined or where
  end
  p.known = p.known or {}
  if not p.known[micro] then
    local actions = {}
    for stage = 0, p.pipeline - 1 do
      actions[stage + 1] = f(stage, p.pipeline, micro, p.chunks)
      if type(actions[stage + 1]) ~= "table" then
        util.fail_at(where, "schedule %s: for stage %d it returned %s; it must return a list of { \"F\" | \"B\" | \"W\", microbatch "
          .. "[, chunk] }", name, stage, util.show(actions[stage + 1]))
      end
    end
    p.known[micro] = core.schedule { ranks = p.pipeline, chunks = p.chunks, micro = micro, name = name, where = where,
      place = placed(p), actions = actions }
  end
  return p.known[micro], name
end

function P.pipeline(o, p, graph, how)
  if p.pipeline == 1 then return end
  o.pipeline = { chunks = p.chunks, place = placed(p), where = util.where() }
  if not o.train then return end
  o.pipeline.schedules = util.map(how.micros, function(n) return (P.schedule(p, n)) end)
  if not how.layout then o.pipeline.starts = cut.starts(p.stages, graph) end
end

return P
