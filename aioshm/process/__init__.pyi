from aioshm.process.orphans import adopt_orphans as adopt_orphans
