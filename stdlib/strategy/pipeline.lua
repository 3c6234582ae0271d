-- Pipeline parallelism: the model is cut into stages, one (or several chunks) on each rank of the axis "pipeline"; a schedule
-- says in which order a stage takes its microbatches.
local cut = require "dtrain.strategy.cut"
local stages = require "dtrain.strategy.stages"
local util = require "dtrain.util"

local P = { name = "pipeline", options = { { "pipeline", "count", 1 }, { "schedule", "string|callable|table" },
  { "chunks", "count" }, { "stages", "string|table", "auto" } } }

--- parallel = { pipeline = ranks, schedule = "gpipe" | "1f1b" (default) | "interleaved" | "zb_h1" | function(rank, ranks,
--- microbatches, chunks) | { place =, order =, chunks = }, chunks = stages a rank, stages = "auto" | { blocks of each stage } |
--- { names at which stages 1, 2, ... begin, as Lua patterns } }
function P.check(p)
  local s = p.schedule and stages.new(p.schedule, p.chunks)
  local chunks = s and s.chunks or p.chunks or 1
  if p.pipeline == 1 and p.chunks and p.chunks > 1 and p.schedule ~= "interleaved" then
    util.fail("dt.job: parallel: chunks = %d, but pipeline = 1; chunks belong to stages: set pipeline = 2 or more, or "
      .. "leave chunks out", p.chunks)
  end
  p.stages = cut.check(p.stages, p.pipeline * chunks)
end

function P.axes(p) return { { name = "pipeline", size = p.pipeline, splits = "stages" } } end
function P.schedule(p) return p.schedule end
function P.cut(g, p) return cut.starts(p.stages, g) end

return P
