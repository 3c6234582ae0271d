-- From `parallel = { ... }` to what the passes are told. A strategy is a table of functions, each of which may be
-- missing; `strategies` lists the library's own in the order in which they act, and a script may add its own:
--
--   name                     for messages
--   options                  rows of util.options: the keys of `parallel` that it reads
--   check(p)                 p: the checked options of all strategies; refuses what can't be honoured
--   axis(p)                  name and size of the mesh axis that it adds, when larger than 1
--   place(graph, p, mesh)    after the forward trace: tells graph:place where parameters and values lie
--   compile(o, p, mesh, graph, how)   adds to the options of graph:compile; how: see trace.train
--   fit(p, how, make)        make() traces and compiles a plan with what p says now: calls it until the plan fits, and
--                            returns its results
--   fits(p)                  whether fit would change anything; missing: it would
--   variants                 rows { key, { values, the plain one first } }: what `dtrain check --all` tries beside the
--                            library's own
local util = require "dtrain.util"

local M = {}

local own = { "data", "zero", "local_sgd", "tensor", "pipeline", "recompute" }
local library = util.map(own, function(name) return require("dtrain.strategy." .. name) end)

local form = { { "name", "string" }, { "options", "table" }, { "check", "function" }, { "axis", "function" },
  { "place", "function" }, { "compile", "function" }, { "fit", "function" }, { "variants", "table" } }

local Strategy = { __name = "strategy" }
Strategy.__index = Strategy

-- axes in the mesh's order, outermost first, when the script says nothing: stages far apart, tensor parts close together
local order = { "pipeline", "data", "tensor" }

--- Checks `parallel` and returns what engine and trace ask: s.p (all options), s:mesh(ranks),
--- s:localize(graph, where), s:compile(options, mesh).
function M.new(given)
  local rows = { { "mesh", "table", order }, { "strategies", "table", {} } }
  local list = table.move(library, 1, #library, 1, {})
  for i, s in ipairs(given.strategies or {}) do
    list[#list + 1] = util.options(("dt.job: parallel: strategies[%d]"):format(i), s, form)
  end
  local from = { mesh = "dtrain", strategies = "dtrain" }
  for i, s in ipairs(list) do
    for _, row in ipairs(s.options or {}) do
      if from[row[1]] then
        util.fail("dt.job: parallel: the option %s of strategy %s is %s's already; give it another name", row[1],
          s.name or ("strategies[%d]"):format(i - #library), from[row[1]])
      end
      from[row[1]] = s.name or "another strategy"
      rows[#rows + 1] = row
    end
  end
  local self = setmetatable({ list = list, p = util.options("dt.job: parallel", given, rows) }, Strategy)
  for _, s in ipairs(list) do if s.check then s.check(self.p) end end
  return self
end

--- The mesh of so many ranks: { { name =, size = } ... }, outermost axis first. An error shows the equation.
function Strategy:mesh(ranks)
  local p, size, others, terms = self.p, {}, 1, {}
  for _, s in ipairs(self.list) do
    local name, n
    if s.axis then name, n = s.axis(p) end
    if name then
      if n ~= "auto" or name ~= "data" then util.check(("dt.job: parallel: the size of the axis %s"):format(name), n, "count") end
      if size[name] then
        util.fail("dt.job: parallel: two strategies add the axis %q; give the one of %s another name", name, s.name or "yours")
      end
      size[name] = n
    end
  end
  for name, n in util.sorted(size) do
    if name ~= "data" and n > 1 then
      others = others * n
      terms[#terms + 1] = ("%s %d"):format(name, n)
    end
  end
  local product = #terms > 0 and table.concat(terms, " x ") or "1"
  if p.data == "auto" then
    if ranks % others ~= 0 then
      local low = ranks // others * others
      util.fail("dt.job: parallel: %d rank%s not divide by %s = %d; %s%d ranks would", ranks,
        ranks == 1 and " does" or "s do", product, others,
        low > 0 and low .. " or " or "", low + others)
    end
    size.data = ranks // others
  elseif p.data * others ~= ranks then
    util.fail("dt.job: parallel: data = %d%s, but %d rank%s run; mpirun -n %d%s would do", p.data,
      #terms > 0 and (" x %s = %d"):format(product, p.data * others) or "", ranks, ranks == 1 and "" or "s",
      p.data * others, ranks % others == 0 and (' or data = "auto" (%d)'):format(ranks // others) or "")
  end
  local mesh, seen = {}, {}
  for _, name in ipairs(p.mesh) do
    if not size[name] and not util.contains(order, name) then
      util.fail("dt.job: parallel: mesh: there is no axis %s; %s", util.show(name), util.suggest(tostring(name), order))
    end
    if seen[name] then util.fail("dt.job: parallel: mesh names the axis %q twice", name) end
    seen[name] = true
    if name == "data" or (size[name] or 1) > 1 then mesh[#mesh + 1] = { name = name, size = size[name] or 1 } end
  end
  for name, n in util.sorted(size) do
    if n == 1 and not seen[name] and not util.contains(order, name) then mesh[#mesh + 1] = { name = name, size = 1 } end
    if not seen[name] and (n == "auto" or n > 1 or name == "data") then
      util.fail("dt.job: parallel: mesh = { ... } leaves out the axis %q of size %d; name every axis, outermost first",
        name, n)
    end
  end
  return mesh
end

--- The coordinate of a rank on an axis of a mesh (0 where there is no such axis), and the axis's size.
function M.coord(mesh, rank, name)
  for i = #mesh, 1, -1 do
    if mesh[i].name == name then return rank % mesh[i].size, mesh[i].size end
    rank = rank // mesh[i].size
  end
  return 0, 1
end

local function each(self, what, ...)
  for _, s in ipairs(self.list) do if s[what] then s[what](...) end end
end

--- From the traced graph, in whole shapes, to that of the rank at `where` (job:where_is).
function Strategy:localize(graph, where)
  each(self, "place", graph, self.p, where.mesh)
  graph:localize { rank = where.rank, sequence = self.p.sequence and { "tensor" } or nil }
end

--- Whether plans are traced with several values of options: what was traced for another rank is of no use then.
function Strategy:tries()
  for _, s in ipairs(self.list) do if s.fit and (not s.fits or s.fits(self.p)) then return true end end
  return false
end

function Strategy:fit(how, make)
  for _, s in ipairs(self.list) do
    if s.fit then
      local inner = make
      make = function() return s.fit(self.p, how, inner) end
    end
  end
  return make()
end

function Strategy:compile(options, mesh, graph, how) each(self, "compile", options, self.p, mesh, graph, how) end

return M
